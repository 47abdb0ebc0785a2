"""Mathematics in LaTeX: 1.0 when the final answer equals the right one as an expression, else 0.0, by math-verify."""

import functools
import re
from itertools import product
from typing import Any

from arealite.reward.gsm8k import last_boxed

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("math-verify must be installed for this reward: pip install 'arealite[math]'.") from error

_COMPARISON_S = 2  # a tower of powers would take forever
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")


def math_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **kwargs: Any
) -> float:
    r"""Compare with `answer`: a number, a formula with or without `$`, or a text that ends in `\boxed{}`.

    The last `\boxed{}` or `\fbox{}` of a completion counts, else what math-verify finds. A comparison that takes longer
    than 2 s is not repeated for other completions with that answer; they are not equal.
    """
    right = last_boxed(str(answer)) or str(answer).strip().strip("$")
    if not _parsed(right):
        raise ValueError(f"the column answer must be a formula: got {answer!r:.200}. Correct or drop the row.")
    boxed = last_boxed(completions)
    if boxed is not None:
        return float(_equal(right, boxed))
    found = parse(completions, parsing_timeout=_COMPARISON_S)
    return float(verify(_parsed(right), found, timeout_seconds=_COMPARISON_S))


@functools.lru_cache(maxsize=1024)
def _equal(right: str, given: str) -> bool:
    """Compare formulas; `2e-3` may be 0.002 as well as 2e - 3."""
    forms = ({text, _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)} for text in (right, given))
    return any(verify(_parsed(one), _parsed(other), timeout_seconds=_COMPARISON_S) for one, other in product(*forms))


@functools.lru_cache(maxsize=1024)
def _parsed(formula: str) -> list[Any]:
    return list(parse(f"\\boxed{{{formula}}}", parsing_timeout=_COMPARISON_S))

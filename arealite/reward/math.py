"""Mathematics in LaTeX: 1.0 when the final answer equals the right one as an expression, else 0.0, by math-verify."""

from typing import Any

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("math-verify must be installed for this reward: pip install 'arealite[math]'.") from error


def math_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **kwargs: Any
) -> float:
    r"""Compare with `answer`: a formula with or without `$`, or a text that ends in `\boxed{}`."""
    expected = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer.strip().strip('$')}}}")
    if not expected:
        raise ValueError(f"the column answer must be a formula: got {answer!r:.200}. Correct or drop the row.")
    return float(verify(expected, parse(completions)))

"""A reward for programs: runs them on tests in a sandbox.

A test is `{"input": ..., "output": ...}`, the text on stdin and the text expected on stdout, or statements that must
not raise, such as `assert add(1, 2) == 3`. Expected outputs never enter the sandbox. Assertions do, and run in the
process of the program, which could fool them (an object that equals everything): prefer inputs and outputs.
"""

import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from arealite.reward.sandbox import Limits, Sandbox

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_SANDBOX = Sandbox(Limits(time_s=6, cpu_s=4))


@dataclass(frozen=True)
class Verdict:
    """The result of one test."""

    is_passed: bool
    why: str
    """Empty, or why it failed: the limit that was reached, an exit status, `output`, `not run`."""


def code_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **kwargs: Any
) -> float:
    """Return the share of the tests in `answer` (a list, or JSON) that the program in `completions` passes."""
    verdicts = judge(read_program(completions), read_tests(answer))
    return sum(verdict.is_passed for verdict in verdicts) / len(verdicts)


def all_tests_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any, **kwargs: Any
) -> float:
    """Return 1.0 if the program passes all tests, else 0.0. Tests after the first failure do not run."""
    verdicts = judge(read_program(completions), read_tests(answer), should_stop=True)
    return float(all(verdict.is_passed for verdict in verdicts))


def judge(
    program: str,
    tests: Sequence[dict[str, str] | str],
    *,
    sandbox: Sandbox = _SANDBOX,
    total_s: float = 12.0,
    should_stop: bool = False,
) -> list[Verdict]:
    """Run Python source on tests, one after the other, each in a sandbox of its own.

    Tests do not run, and count as failed, once `total_s` is over (keep it below `rollout.reward_timeout`), after a
    timeout, as the others would time out too, and with `should_stop` after the first failure.
    """
    verdicts: list[Verdict] = []
    deadline = time.monotonic() + total_s
    for test in tests:
        left_s = deadline - time.monotonic()
        failed = [verdict for verdict in verdicts if not verdict.is_passed]
        is_over = left_s <= 0 or any(verdict.why in ("time", "cpu") or should_stop for verdict in failed)
        verdicts.append(Verdict(False, "not run") if is_over else _verdict(program, test, sandbox, left_s))
    return verdicts


def read_program(completion: str) -> str:
    """Return the last block between ``` of a completion, else all of it."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def read_tests(column: Any) -> list[dict[str, str] | str]:
    """Read tests from a column of a data set, a list or a text in JSON."""
    rule = "tests must be a list, or one in JSON, of statements and of {input, output}, which are texts: got"
    try:
        tests = json.loads(column) if isinstance(column, str) else list(column)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{rule} {column!r:.200}. Name another column by answer_key.") from error
    if not tests or not isinstance(tests, list):
        raise ValueError(f"{rule} {column!r:.200}. Correct or drop the row.")
    for test in tests:
        texts = [test.get("input"), test.get("output")] if isinstance(test, dict) else [test]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{rule} {test!r:.200}. Correct or drop the row.")
    return tests


def _verdict(program: str, test: dict[str, str] | str, sandbox: Sandbox, left_s: float) -> Verdict:
    limits = replace(sandbox.limits, time_s=min(left_s, sandbox.limits.time_s))
    if isinstance(test, str):
        proof = secrets.token_hex(16)  # printed after the statements: the program has not ended before them
        statements = f"from program import *\n{test}\nprint({proof!r})"
        result = sandbox.run_here(statements, files={"program.py": program}, limits=limits)
        is_right = result.stdout.rstrip().endswith(proof)
    else:
        result = sandbox.run_here(program, stdin=test["input"], limits=limits)
        is_right = _lines(result.stdout) == _lines(test["output"])
    if result.reason is not None or result.exit_status != 0:
        return Verdict(False, result.reason or f"exit status {result.exit_status}")
    return Verdict(is_right, "" if is_right else "output")


def _lines(text: str) -> list[str]:
    """Return the lines of an output without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]

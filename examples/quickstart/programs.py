"""Generated programming tasks with tests, and those of MBPP: data for `reward: arealite.reward.code:code_reward`.

A generated row is a pure function of the seed and its position. Tasks of the test split have other constants than those
of the train split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import datasets

TASKS: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "their sum": ("sum(n)", sum),
    "the largest": ("max(n)", max),
    "the smallest": ("min(n)", min),
    "the first": ("n[0]", lambda n: n[0]),
    "the last": ("n[-1]", lambda n: n[-1]),
    "how many there are": ("len(n)", len),
    "how many different ones there are": ("len(set(n))", lambda n: len(set(n))),
    "how many are even": ("sum(i % 2 == 0 for i in n)", lambda n: sum(i % 2 == 0 for i in n)),
}
CHANGES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", int.__add__),
    "minus": ("-", int.__sub__),
    "times": ("*", int.__mul__),
}
CONSTANTS = {"train": [n for n in range(2, 100) if n % 5], "test": [n for n in range(2, 100) if n % 5 == 0]}
NUM_TESTS = 4


def rows(split: str, *, seed: int, train: int | str = 2000, test: int | str = 128) -> list[dict[str, Any]]:
    """Generate `train` or `test` rows of a split: `question`, `solution` (a program), `tests` (inputs and outputs)."""
    if split not in CONSTANTS:
        raise ValueError(f"split of the programs must be train or test: got {split!r}. Use one of them.")
    draw = random.Random(f"programs-{seed}-{split}")
    return [_row(draw, CONSTANTS[split]) for _ in range(int({"train": train, "test": test}[split]))]


def mbpp(split: str, *, seed: int, path: str = "google-research-datasets/mbpp") -> list[dict[str, Any]]:
    """Read MBPP (arXiv:2108.07732), whose tests are assertions; the prompt has the first, which names the function."""
    return [
        {
            "question": f"{row['text']}\nYour code must pass this test:\n{row['test_list'][0]}",
            "solution": row["code"],
            "tests": [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]],
        }
        for row in datasets.load_dataset(path, split=split)
    ]


def _row(draw: random.Random, constants: list[int]) -> dict[str, Any]:
    task, change, constant = draw.choice(list(TASKS)), draw.choice(list(CHANGES)), draw.choice(constants)
    (expression, compute), (sign, apply) = TASKS[task], CHANGES[change]
    inputs = [[draw.randint(-9, 99) for _ in range(draw.randint(1, 8))] for _ in range(NUM_TESTS)]
    return {
        "question": f"Read numbers from one line and print {task}, {change} {constant}, as a Python program.",
        "solution": f"n = [*map(int, input().split())]\nprint(({expression}) {sign} {constant})",
        "tests": [
            {"input": " ".join(map(str, numbers)), "output": str(apply(compute(numbers), constant))}
            for numbers in inputs
        ],
    }

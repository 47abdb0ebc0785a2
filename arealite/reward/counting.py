"""Counting: 1.0 when the last number in square brackets is the right one, else 0.0."""

import re
from typing import Any

_NUMBER = re.compile(r"\[\s*(\d+(?:\.\d+)?)\s*\]")


def clevr_count_70k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **kwargs: Any
) -> float:
    """Compare with `answer`, a number with or without brackets."""
    numbers = _NUMBER.findall(completions)
    return float(bool(numbers) and float(numbers[-1]) == float(str(answer).strip().strip("[]")))

"""Reward functions that worker processes import in no time: nothing here needs torch."""

from typing import Any


def columns_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **columns: Any
) -> float:
    assert prompt == f"<|user|>{columns.pop('question')}<|end|><|assistant|>"
    assert columns == {"answer": "3+7=10\n#### 10"}
    return len(completions) + len(prompt_ids) / 100 + len(completion_ids) / 10000


def brevity(completions: str, **_: Any) -> float:
    return -float(len(completions))


def failing_reward(**_: Any) -> float:
    raise KeyError("oops")


def has_seven(completions: str, **columns: Any) -> float:
    return float("7" in completions)


def length_of_answer(completions: str, **columns: Any) -> float:
    return float(len(completions))

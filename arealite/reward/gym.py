"""Scores of reasoning-gym, by the scorer of the row's task."""

import functools
from collections.abc import Callable, Mapping
from typing import Any


def reasoning_gym_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    task: str,
    entry: Mapping[str, Any],
    **kwargs: Any,
) -> float:
    """Score what stands in the last `<answer></answer>`, else all that follows the thoughts, from 0 to 1.

    `task` and `entry` are columns of the rows of `reasoning_gym:TASK`. A text that makes the scorer raise, as it can't
    be read as an answer, scores 0.
    """
    from reasoning_gym.utils import extract_answer  # takes a second, and writes the cache of matplotlib

    text, score = completions.rpartition("</think>")[2], _scorer(task)
    answer = extract_answer(text)
    try:
        return float(score(text.strip() if answer is None else answer, entry))
    except Exception:
        return 0.0


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str, Mapping[str, Any]], float] = get_score_answer_fn(task)
    return scorer

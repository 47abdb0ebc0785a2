"""What a reward function looks like."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

RewardFunction: TypeAlias = Callable[..., "float | Awaitable[float]"]
"""Scores one completion: `f(prompt, completions, prompt_ids, completion_ids, **columns) -> float`.

`completions` is the text of one completion; the other columns of the data set arrive as keywords. A coroutine function
is awaited; a plain function must be importable (defined at module level) or typed into a notebook, because it runs in
another process.
"""

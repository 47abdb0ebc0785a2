"""What a reward function looks like."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Scores one completion. May be a coroutine function. The other columns of the data set arrive as keywords.

    A plain function must be importable (defined at module level): it runs in another process.
    """

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **kwargs: Any
    ) -> float | Awaitable[float]: ...

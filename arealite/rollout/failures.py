"""What went wrong with episodes: counted by kind, and the error budget of a run.

Invariant: an episode that failed for good is counted exactly once, and never turns into a reward of 0.
"""

from __future__ import annotations

from collections import Counter

from arealite.api.errors import EpisodeError, EpisodeTimeoutError, RewardError, ServerError, TrajectoryError

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (EpisodeTimeoutError, "timeout"),
    (RewardError, "reward"),
    (ServerError, "server"),
    (TrajectoryError, "trajectory"),
)


class FailureLog:
    """Counts dropped episodes and stops the run when there are too many."""

    def __init__(self, max_failed_episodes: int) -> None:
        self.max_failed_episodes = max_failed_episodes
        self.dropped: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._last: Exception | None = None

    def drop(self, error: Exception) -> None:
        """Note an episode that failed for good."""
        self.dropped[kind_of(error)] += 1
        self._causes[describe(error)] += 1
        self._last = error

    def check(self) -> None:
        """Raise EpisodeError when the budget is spent."""
        num_dropped = self.dropped.total()
        if num_dropped <= self.max_failed_episodes:
            return
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.dropped.most_common())
        cause, count = self._causes.most_common(1)[0]
        raise EpisodeError(
            f"at most {self.max_failed_episodes} episodes must fail: got {num_dropped} ({kinds}); {count} of them with "
            f"{cause}. Mend the cause or raise rollout.max_failed_episodes."
        ) from self._last


def kind_of(error: BaseException) -> str:
    """Name the kind of a failure; a group of errors is of its first one's kind."""
    if isinstance(error, BaseExceptionGroup):
        return kind_of(error.exceptions[0])
    return next((kind for type_, kind in _KINDS if isinstance(error, type_)), "workflow")


def describe(error: BaseException) -> str:
    """Return one short line."""
    if isinstance(error, BaseExceptionGroup):
        return describe(error.exceptions[0])
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text[:300]}"

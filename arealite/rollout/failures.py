"""Failure budgets: counts of failed and rejected episodes by cause, and the limits that stop a run.

Invariant: an episode that failed for good is counted exactly once, and never turns into a reward of 0.
"""

from collections import Counter, deque

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import AReaLiteError, EpisodeError, RewardError, UnreachableError
from arealite.api.script import lines_of_error, users_line

BY_WORKFLOW, BY_FILTER, OVERDUE = "workflow", "filter", "overdue"  # reasons of a rejection
_SHOWN_CAUSES = 3
_MAX_REJECTED_BATCHES = 20  # in a row
_MIN_FIRST = 4  # this many first episodes (or one batch, if larger) that all fail with one cause stop the run


class Budgets:
    """Limits on the share of recent episodes that fail, and on episodes in a row without an accepted one."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.failure_window = config.failure_window
        self.max_failed = int(config.max_failed_share * config.failure_window + 1e-9)
        self.max_rejected_in_a_row = config.max_rejected_in_a_row or _MAX_REJECTED_BATCHES * config.consumer_batch_size
        # Cause of each failure; None for an episode that did not fail.
        self._recent: deque[str | None] = deque([None] * config.failure_window, maxlen=config.failure_window)
        self._examples: dict[str, BaseException] = {}  # the last failure of each cause
        self._in_a_row: Counter[str] = Counter()  # episodes since the last accepted one, by outcome
        self._attempts: Counter[str] = Counter()  # failed attempts by cause
        self._num_first = max(_MIN_FIRST, config.consumer_batch_size)
        self._num_ended = 0
        self._first_causes: set[str | None] = set()  # None for an error that may be transient

    def attempt(self, error: BaseException) -> int:
        """Count a failed attempt and return the number of failures with its cause."""
        self._attempts[cause := _cause_of(error)] += 1
        return self._attempts[cause]

    def end(self, error: BaseException | None) -> None:
        """Count a finished episode; `error` is the cause of its final failure."""
        cause = None if error is None else _cause_of(error)
        self._recent.append(cause)
        if error is not None and cause is not None:
            self._examples[cause] = error
        self._num_ended += 1
        self._first_causes.add(None if error is None or is_transient(error) else cause)

    def reject(self, reason: str) -> None:
        """Count a rejection by the workflow or a filter, but not one for age or a client that left."""
        if reason in (BY_WORKFLOW, BY_FILTER):
            self._in_a_row[f"rejected by {reason}"] += 1

    def fail(self, error: BaseException) -> None:
        """Count a failure that was replaced by another prompt, unless it is an unreachable server."""
        if not is_transient(error):
            self._in_a_row["failed"] += 1

    def accept(self) -> None:
        """Record a finally accepted episode: the row without one starts anew."""
        self._in_a_row.clear()

    def check(self) -> None:
        num_failed = self.failure_window - self._recent.count(None)
        if num_failed > self.max_failed:
            causes, example = self.causes()
            raise EpisodeError(
                f"at most {self.max_failed} of the last {self.failure_window} episodes must fail: got "
                f"{num_failed}. Fix the cause or raise rollout.max_failed_share.{causes}"
            ) from example
        is_common = len(self._first_causes) == 1 and None not in self._first_causes
        if is_common and self._num_ended >= self._num_first and self.max_failed < self.failure_window:
            causes, example = self.causes()
            raise EpisodeError(
                f"the first {self._num_ended} episodes must not all fail: got one cause for all. Fix it.{causes}"
            ) from example
        if self._in_a_row.total() > self.max_rejected_in_a_row:
            ends = ", ".join(f"{count} {end}" for end, count in self._in_a_row.most_common())
            causes, example = self.causes()
            raise EpisodeError(
                f"at most {self.max_rejected_in_a_row} episodes must be rejected or fail with none accepted in "
                f"between: got {self._in_a_row.total()} ({ends}). Look at why, or raise "
                f"rollout.max_rejected_in_a_row.{causes}"
            ) from example

    def causes(self) -> tuple[str, BaseException | None]:
        """Return the causes of recent failures as lines, most common first, and an example error of the first."""
        causes = Counter(cause for cause in self._recent if cause is not None)
        shown, num_hidden = causes.most_common(_SHOWN_CAUSES), max(0, len(causes) - _SHOWN_CAUSES)
        lines = [f"\n{count} x {_summary(self._examples[cause])}" for cause, count in shown]
        lines += [f"\nand {num_hidden} other causes"] * (num_hidden > 0)
        return "".join(lines), self._examples[shown[0][0]] if shown else None


def _summary(error: BaseException) -> str:
    return ". ".join([f"{kind_of(error)}: {describe(error)}", *getattr(first(error), "__notes__", [])])


def kind_of(error: BaseException) -> str:
    error = first(error)
    kind = error.kind if isinstance(error, AReaLiteError) else "workflow"
    return f"reward_{kind}" if isinstance(error, RewardError) else kind


def _cause_of(error: BaseException) -> str:
    """Return the cause of an error: its kind, its class, and the line that raised it."""
    error = first(error)
    lines = lines_of_error(error)
    return f"{kind_of(error)} ({type(error).__name__} at {_place_of(error) or (lines[0] if lines else '?')})"


def _place_of(error: BaseException) -> str:
    """Return the line of the user's code that raised, or an empty string."""
    return error.place if isinstance(error, RewardError) else str(users_line(lines_of_error(error)) or "")


def is_transient(error: BaseException) -> bool:
    """Return whether the error is an unreachable server, which may come back."""
    return isinstance(first(error), UnreachableError)


def first(error: BaseException) -> BaseException:
    """Return the first error of a group, or the error itself."""
    return first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def describe(error: BaseException) -> str:
    error = first(error)
    try:
        text = str(error).strip().partition("\n")[0].rstrip(".")
    except Exception as another:  # of the user's class
        text = f"a message that raises {type(another).__name__}"
    place = _place_of(error)
    return f"{type(error).__name__}: {text[:300]}{', at ' if place else ''}{place}"

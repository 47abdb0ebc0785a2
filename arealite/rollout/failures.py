"""Why episodes fail or are rejected, and the budgets that stop a run.

Invariant: an episode that failed for good is counted exactly once, and never turns into a reward of 0.
"""

from collections import Counter, deque

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import AReaLiteError, EpisodeError, RewardError, UnreachableError
from arealite.api.source_lines import lines_of_error, users_line

BY_WORKFLOW, BY_FILTER, OVERDUE = "workflow", "filter", "overdue"  # why an episode is rejected
_SHOWN_CAUSES = 3
_MAX_REJECTED_BATCHES = 20  # in a row
_MIN_FIRST = 4  # episodes that fail alike before anything else end the run, or a batch of them if that is more


class Budgets:
    """Limits on the share of recent episodes that fail, and on those in a row of which none is accepted."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.failure_window = config.failure_window
        self.max_failed = int(config.max_failed_share * config.failure_window + 1e-9)
        self.max_rejected_in_a_row = config.max_rejected_in_a_row or _MAX_REJECTED_BATCHES * config.consumer_batch_size
        # The cause of each failure, None for an episode that ended otherwise.
        self._recent: deque[str | None] = deque([None] * config.failure_window, maxlen=config.failure_window)
        self._examples: dict[str, BaseException] = {}  # the last failure of each cause
        self._in_a_row: Counter[str] = Counter()  # episodes without an accepted one in between, by what became of them
        self._attempts: Counter[str] = Counter()  # that failed, by cause
        self._num_first = max(_MIN_FIRST, config.consumer_batch_size)
        self._num_ended = 0
        self._first_causes: set[str | None] = set()  # None for one that may pass

    def attempt(self, error: BaseException) -> int:
        """Count an attempt that failed, and return how many have failed of that cause."""
        self._attempts[cause := _cause_of(error)] += 1
        return self._attempts[cause]

    def end(self, error: BaseException | None) -> None:
        """Count an episode that ended; `error` is why it failed for good."""
        cause = None if error is None else _cause_of(error)
        self._recent.append(cause)
        if error is not None and cause is not None:
            self._examples[cause] = error
        self._num_ended += 1
        self._first_causes.add(None if error is None or may_pass(error) else cause)

    def reject(self, reason: str) -> None:
        """Count a rejection by the workflow or a filter; age, and who leaves, say nothing about them."""
        if reason in (BY_WORKFLOW, BY_FILTER):
            self._in_a_row[f"rejected by {reason}"] += 1

    def fail(self, error: BaseException) -> None:
        """Count a failure for which another prompt is tried, on and on; servers that can't be reached may come back."""
        if not may_pass(error):
            self._in_a_row["failed"] += 1

    def accept(self) -> None:
        """Count an episode that was accepted for good."""
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
        """Return why recent episodes failed, the commonest cause first and below each other, and one of its errors."""
        causes = Counter(cause for cause in self._recent if cause is not None)
        shown, num_hidden = causes.most_common(_SHOWN_CAUSES), max(0, len(causes) - _SHOWN_CAUSES)
        lines = [f"\n{count} x {_told(self._examples[cause])}" for cause, count in shown]
        lines += [f"\nand {num_hidden} other causes"] * (num_hidden > 0)
        return "".join(lines), self._examples[shown[0][0]] if shown else None


def _told(error: BaseException) -> str:
    return ". ".join([f"{kind_of(error)}: {describe(error)}", *getattr(first(error), "__notes__", [])])


def kind_of(error: BaseException) -> str:
    error = first(error)
    kind = error.kind if isinstance(error, AReaLiteError) else "workflow"
    return f"reward_{kind}" if isinstance(error, RewardError) else kind


def _cause_of(error: BaseException) -> str:
    """Return what failures of one cause share: kind, class, and the line that raised."""
    error = first(error)
    lines = lines_of_error(error)
    return f"{kind_of(error)} ({type(error).__name__} at {_place_of(error) or (lines[0] if lines else '?')})"


def _place_of(error: BaseException) -> str:
    """Return the user's line that an error is about; empty if there is none."""
    return error.place if isinstance(error, RewardError) else str(users_line(lines_of_error(error)) or "")


def may_pass(error: BaseException) -> bool:
    """Tell whether servers could not be reached, which may come back."""
    return isinstance(first(error), UnreachableError)


def first(error: BaseException) -> BaseException:
    """Return what stands for a group of errors: its first one."""
    return first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def describe(error: BaseException) -> str:
    error = first(error)
    try:
        text = str(error).strip().partition("\n")[0].rstrip(".")
    except Exception as another:  # the class is the user's
        text = f"a message that raises {type(another).__name__}"
    place = _place_of(error)
    return f"{type(error).__name__}: {text[:300]}{', at ' if place else ''}{place}"

"""Runs one attempt at a prompt, the user's workflow under a deadline, and records its end.

Failure budgets count failed and rejected episodes by cause, and stop a run at their limits. Invariants: an attempt ends
accepted, rejected or failed, whatever its workflow raises; only the executor's own cancellation, KeyboardInterrupt and
SystemExit leave as exceptions; ledger and budgets record each end exactly once; a failure never becomes a reward of 0.
"""

import asyncio
import logging
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import (
    AbandonedError,
    AReaLiteError,
    ContextOverflowError,
    EpisodeError,
    EpisodeTimeoutError,
    RewardError,
    TrajectoryError,
    UnreachableError,
    WorkerLostError,
)
from arealite.api.run_metrics import OTHER_REWARDS
from arealite.api.script import lines_of_error, users_line
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.evaluation import is_binary
from arealite.rollout.event_loop import activity
from arealite.rollout.prompts import Episode, Prompt, current_episode
from arealite.rollout.trajectory import Columns, check_trajectory

logger = logging.getLogger("arealite.rollout")


Outcome: TypeAlias = TensorDict | str | BaseException  # accepted trajectory, reason of a rejection, or error

_MAX_REWARDS = 1_000_000

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


class Attempts(Protocol):
    """Runs attempts in this process or in others."""

    async def run(self, episode: Episode) -> Outcome:
        """Run one attempt and return its outcome; cancelling the caller's task cancels it."""


@dataclass(frozen=True)
class LocalAttempts:
    """Runs attempts in the event loop of this process."""

    config: InferenceEngineConfig
    engine: InferenceEngine
    is_evaluation: bool = False

    async def run(self, episode: Episode) -> Outcome:
        """Run one attempt in its own task, so that a workflow that cancels itself does not cancel the caller."""
        timeout_s = self.config.episode_timeout
        outcome: Outcome
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                episode.deadline = deadline
                outcome = await asyncio.create_task(self._run(episode))
        except TimeoutError as error:
            outcome = error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling() > 0:
                raise
            outcome = EpisodeError("a workflow or filter must not cancel itself, nor await a task that is cancelled.")
            outcome.__cause__ = error
        if isinstance(outcome, KeyboardInterrupt | SystemExit):
            raise outcome from None
        if isinstance(outcome, BaseException) and deadline.expired():
            late = EpisodeTimeoutError(
                f"an episode must end within rollout.episode_timeout = {timeout_s:g} s: prompt {episode.prompt_id} did "
                "not. Raise it, or shorten the episode."
            )
            late.__cause__ = outcome
            return late
        return outcome

    async def _run(self, episode: Episode) -> Outcome:
        """Return the outcome of the workflow, including exceptions that will end the event loop."""
        prompt = episode.prompt
        assert prompt.workflow is not None, f"prompt {prompt.prompt_id} has no workflow"
        current_episode.set(episode)
        try:
            with activity.episode(str(prompt.prompt_id)):
                returned = await prompt.workflow.arun_episode(self.engine, prompt.row)
            return BY_WORKFLOW if returned is None else self._judged(episode, returned)
        except AbandonedError as error:
            return error.reason
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a Rust panic and GeneratorExit are no Exception
            interrupts = BaseExceptionGroup("", [error]).subgroup((KeyboardInterrupt, SystemExit))
            return error if interrupts is None else first(interrupts)

    def _judged(self, episode: Episode, returned: object) -> TensorDict | str:
        """Validate the trajectory and apply the filter; return the trajectory, or the reason of its rejection."""
        prompt = episode.prompt
        # Servers hold the weights of an update before the engine counts it, and may keep newer ones of an earlier
        # run; an engine for evaluations may not know the version.
        newest_version = math.inf if self.is_evaluation else max(self.engine.get_version() + 1, episode.newest_version)
        needs_kept = episode.is_narrowed and not self.is_evaluation
        trajectory = check_trajectory(returned, episode.head_version, newest_version, needs_kept=needs_kept)
        rewards: list[float] = trajectory["rewards"].tolist()
        samples = trajectory["sample_index"].tolist() if "sample_index" in trajectory else range(len(rewards))
        episode.rewards = list(dict(zip(samples, rewards)).values())  # rows of one run share its reward
        is_wanted = prompt.should_accept is None or prompt.should_accept(trajectory)
        return trajectory if is_wanted else BY_FILTER


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs attempts and records their ends."""

    config: InferenceEngineConfig
    attempts: Attempts
    ledger: Ledger
    budgets: Budgets
    columns: Columns = field(default_factory=Columns)
    sampled_rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REWARDS))
    """Rewards of all returned trajectories since `reward_metrics` was last called."""

    def reward_metrics(self) -> dict[str, float]:
        """Return the mean reward since the last call, with rejected groups, and whether one was neither 0 nor 1."""
        rewards = [self.sampled_rewards.popleft() for _ in range(len(self.sampled_rewards))]  # the loop appends more
        if not rewards:
            return {}
        return {"reward/sampled_mean": sum(rewards) / len(rewards), OTHER_REWARDS: float(not is_binary(rewards))}

    def start(self, prompt: Prompt, head_version: int) -> Episode:
        if prompt.first_started_s is None:
            prompt.first_started_s = asyncio.get_running_loop().time()
        self.ledger.start(prompt, head_version)
        return Episode(prompt, prompt.attempt, head_version, self.config.seed)

    async def run(self, episode: Episode) -> Outcome:
        """Run one attempt and return its outcome; cancelling the caller's task cancels it."""
        outcome = await self.attempts.run(episode)
        self.sampled_rewards.extend(episode.rewards)
        try:
            if isinstance(outcome, TensorDict):
                self.columns.check(outcome, episode.prompt.workflow)
        except TrajectoryError as error:
            outcome = error
        if isinstance(outcome, TrajectoryError):
            prompt = episode.prompt
            outcome.add_note(f"It was returned for prompt {prompt.prompt_id} by {type(prompt.workflow).__name__}.")
        return outcome

    def end(self, episode: Episode, outcome: Outcome) -> bool:
        """Record the end of an attempt and return whether its prompt must run again.

        The budgets count an accepted episode only once no filter can reject it.
        """
        prompt = episode.prompt
        if isinstance(outcome, WorkerLostError) and prompt.is_repeatable:  # no failure of the attempt
            self.ledger.retry(prompt, kind_of(outcome))
            return True
        if isinstance(outcome, BaseException):
            may_retry = prompt.is_repeatable and prompt.attempt < self.config.episode_retries
            may_retry &= not isinstance(first(outcome), ContextOverflowError)
            what = f"episode {prompt.prompt_id} of {type(prompt.workflow).__name__}"
            what += f" failed in attempt {prompt.attempt} ({kind_of(outcome)})"
            num_alike = self.budgets.attempt(outcome)
            if math.log10(num_alike).is_integer():
                alike = f" ({num_alike} alike so far)" if num_alike > 1 else ""
                what += f", {'trying again' if may_retry else 'dropped'}{alike}"
                logger.warning("%s: %s", what, describe(outcome))
            if may_retry:
                self.ledger.retry(prompt, kind_of(outcome))
                prompt.attempt += 1
                return True
        record = episode.samples, asyncio.get_running_loop().time() - (prompt.first_started_s or 0.0)
        self.budgets.end(outcome if isinstance(outcome, BaseException) else None)
        if isinstance(outcome, BaseException):
            self.ledger.drop(prompt, "failed", kind_of(outcome), *record)
        elif isinstance(outcome, str):
            self.ledger.drop(prompt, "rejected", outcome, *record)
            self.budgets.reject(outcome)
        else:
            self.ledger.accept(prompt, *record)
            episode.trajectory = outcome
        return False

    def check(self) -> None:
        """Raise if a failure budget is spent or the ledger can't be written."""
        self.budgets.check()
        self.ledger.check()

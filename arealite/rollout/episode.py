"""Runs one attempt at a prompt, the user's workflow under a deadline, and records its end.

The inference client reads the current attempt from `current_episode`, which tasks of the workflow inherit. Invariants:
an attempt ends accepted, rejected or failed, whatever its workflow raises; only the executor's own cancellation,
KeyboardInterrupt and SystemExit leave as exceptions; ledger and budgets record each end exactly once.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import pyarrow as pa
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import (
    AbandonedError,
    ContextOverflowError,
    EpisodeError,
    EpisodeTimeoutError,
    TrajectoryError,
    WorkerLostError,
)
from arealite.api.io_struct import ModelRequest, PromptId
from arealite.api.run_metrics import OTHER_REWARDS
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.activity import activity
from arealite.rollout.evaluation import is_binary
from arealite.rollout.failures import BY_FILTER, BY_WORKFLOW, Budgets, describe, first, kind_of
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.trajectory import Columns, check_trajectory

logger = logging.getLogger("arealite.rollout")

Outcome: TypeAlias = TensorDict | str | BaseException  # accepted trajectory, reason of a rejection, or error


@dataclass(eq=False)
class Episode:
    """One attempt at one prompt."""

    prompt: Prompt
    attempt: int
    head_version: int
    seed: int  # seed of the run
    num_samples: int = 0  # completions requested so far
    num_asked: Counter[str] = field(default_factory=Counter)  # by seed_key and digest of the prompt
    servers: set[str] = field(default_factory=set)  # addresses of servers that sampled its tokens
    newest_version: int = -1  # newest weight version of its tokens
    is_narrowed: bool = False  # whether top_p, top_k or min_p restricted a completion
    samples: list[SampleRecord] = field(default_factory=list)  # completions, in the order of their ends
    rewards: list[float] = field(default_factory=list)  # of the returned trajectory, also of a rejected one
    table: pa.Table | None = None  # its rows of the rollout file, if another process built them
    trajectory: TensorDict = field(init=False, repr=False)  # set once the attempt is accepted
    deadline: asyncio.Timeout | None = None  # of the running attempt
    num_waiting_for_servers: int = 0  # requests that no server can take now
    left_s: float = 0.0  # remaining time while the clock is stopped

    @property
    def prompt_id(self) -> PromptId:
        return self.prompt.prompt_id

    @property
    def has_time(self) -> bool:
        """Whether the attempt has time left, or its clock is stopped."""
        when = None if self.deadline is None else self.deadline.when()
        return self.num_waiting_for_servers > 0 or (when is not None and when > asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop the clock of the attempt while one of its requests waits because no server can take it."""
        loop, deadline = asyncio.get_running_loop(), self.deadline
        if deadline is not None and self.num_waiting_for_servers == 0:
            self.left_s = (deadline.when() or loop.time()) - loop.time()
            deadline.reschedule(None)
        self.num_waiting_for_servers += 1
        try:
            yield
        finally:
            self.num_waiting_for_servers -= 1
            if deadline is not None and self.num_waiting_for_servers == 0:
                with contextlib.suppress(RuntimeError):  # raised once the attempt has ended
                    deadline.reschedule(loop.time() + self.left_s)

    def next_sample(self, req: ModelRequest) -> tuple[int, int]:
        """Return the number and the sampling seed of the next completion."""
        self.num_samples, number = self.num_samples + 1, self.num_samples
        sample: int | str = number
        if req.seed_key is not None:
            asked = f"{req.seed_key}/{hashlib.blake2b(array('q', req.input_ids).tobytes(), digest_size=16).hexdigest()}"
            sample = f"{asked}/{self.num_asked[asked]}"
            self.num_asked[asked] += 1
        return number, sampling_seed(self.seed, self.prompt_id, sample=sample, attempt=self.attempt)


Keep: TypeAlias = Callable[[Episode], None]
"""Callback that receives an episode once it is accepted, in the event loop."""

current_episode: ContextVar[Episode | None] = ContextVar("current_episode", default=None)


def sampling_seed(run_seed: int, prompt_id: PromptId, *, sample: int | str, attempt: int) -> int:
    """Derive a 48-bit seed (exact in JSON) from the identity of a completion.

    It does not depend on timing if the workflow starts its samples in a fixed order or names its runs (`seed_key`).
    """
    key = f"{run_seed}/{prompt_id.epoch}/{prompt_id.index}/{sample}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")


_MAX_REWARDS = 1_000_000


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
        other = float(not is_binary(rewards))
        return {"reward/sampled_mean": sum(rewards) / len(rewards), OTHER_REWARDS: other}

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

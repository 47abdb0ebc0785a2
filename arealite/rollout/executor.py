"""Runs episodes: admits prompts, retries failures, and hands out batches whose staleness is bounded.

All state lives in one event loop, in a thread of its own, and changes only there between two awaits: no locks. Every
change sets one event that all waits look at; nothing polls. Who may start and what may be taken is decided by
`StalenessAccount`; `run_all` is a lane beside it, for evaluation and synchronous batches.

Invariants: every episode ends exactly once, as accepted, rejected or failed; a wait that raises loses nothing;
no wait outlives `episode_timeout` without an event.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.api.io_struct import PromptId, RolloutStat
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.attempt import ShouldAccept, Submission, run_attempt
from arealite.rollout.episode import Episode
from arealite.rollout.event_loop import EventLoopThread
from arealite.rollout.failures import FailureLog, describe, kind_of
from arealite.rollout.prompts import PromptSource, Row, named
from arealite.rollout.staleness import StalenessAccount
from arealite.rollout.store import RolloutStore
from arealite.rollout.trajectory import FinishedEpisode, assemble_batch

logger = logging.getLogger("arealite.rollout")

_GRACE_S = 30.0
"""Added to `episode_timeout` before a wait without any event gives up."""
_CLOSE_S = 10.0
"""How long cancelled tasks may take to end."""


class RolloutExecutor:
    """The one account of a run's episodes, on global rank 0."""

    def __init__(self, config: InferenceEngineConfig, engine: InferenceEngine) -> None:
        self.config = config
        self.stats = RolloutStat()
        self._engine = engine
        self._max_concurrent = config.max_concurrent_rollouts or config.consumer_batch_size
        self._queue_size = config.queue_size or 16 * self._max_concurrent
        self._account = StalenessAccount(
            batch_size=config.consumer_batch_size,
            max_head_offpolicyness=config.max_head_offpolicyness,
            max_concurrent=self._max_concurrent,
            version=engine.get_version(),
        )
        self._failures = FailureLog(config.max_failed_episodes)
        self._queue: deque[Submission] = deque()
        self._ready: list[FinishedEpisode] = []
        self._unjudged: list[FinishedEpisode] = []
        self._is_paused = False
        self._num_unnamed = 0
        self._source: PromptSource | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._store = _store_of(config)
        self.loop = EventLoopThread("arealite-rollout")

    # Called by the trainer's thread

    def submit(self, row: Row, workflow: RolloutWorkflow) -> None:
        """Queue one episode and return at once."""
        if len(self._queue) >= self._queue_size:
            raise RuntimeError(
                f"at most rollout.queue_size = {self._queue_size} episodes must wait to start: got one more. "
                "Call wait, or raise queue_size."
            )
        row = named(row, self._next_unnamed())
        self.loop.run(self._enqueue([Submission(row, workflow)]))

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        """Return `count` accepted trajectories, oldest first."""
        return self._hand_out(self.loop.run(self._collect(count, timeout, should_accept)))

    def prepare_batch(
        self, dataloader: Iterable[list[Row]], workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        """Return the next batch of bounded staleness; prompts are pulled in the caller's thread as they are wanted."""
        if self._source is None or self._source.dataloader is not dataloader:
            self._source = PromptSource(dataloader)
        while num_wanted := self.loop.run(self._num_prompts_wanted()):
            rows: list[Row] = []
            while len(rows) < num_wanted:
                rows += self._source.pull()
            self.loop.run(self._enqueue([Submission(row, workflow, should_accept) for row in rows]))
        return self._hand_out(self.loop.run(self._collect(self.config.consumer_batch_size, None, None)))

    def run_all(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool = False) -> TensorDict:
        """Run one episode per row now, also while paused, and return what was accepted.

        Staleness throttles nothing here. Evaluations take any version of the weights: a second engine may not be told.
        """
        submissions = [Submission(named(row, self._next_unnamed()), workflow) for row in rows]
        oldest_version = 0 if is_evaluation else self._account.version
        finished = self.loop.run(self._run_lane(submissions, oldest_version))
        if not finished:
            raise EpisodeError(
                f"at least one of {len(rows)} episodes must be accepted: got none "
                f"(dropped in this run: {dict(self._failures.dropped)}). Look at the workflow and its reward."
            )
        return self._hand_out(finished, is_evaluation=is_evaluation)

    def pause(self) -> None:
        """Start no new episodes."""
        self.loop.run(self._set_paused(True))

    def resume(self) -> None:
        """Start episodes again."""
        self.loop.run(self._set_paused(False))

    def set_version(self, version: int) -> None:
        """Move the account to another version of the weights."""
        self.loop.run(self._set_version(version))

    def metrics(self) -> dict[str, float]:
        """Return the counts since the run began, by metric name."""
        counts = {"accepted": self.stats.accepted, "rejected": self.stats.rejected, "running": self.stats.running}
        failed = {f"failed_{kind}": count for kind, count in self._failures.dropped.items()}
        return {f"rollout/{name}": float(count) for name, count in (counts | failed).items()}

    def close(self) -> None:
        """Cancel what runs, end the thread and finish writing rollouts."""
        self.loop.close(_CLOSE_S)
        if self._store is not None:
            self._store.close()

    def _hand_out(self, finished: list[FinishedEpisode], *, is_evaluation: bool = False) -> TensorDict:
        finished = sorted(finished, key=lambda one: _id_key(one.episode))
        if self._store is not None:
            name = f"{'eval_' * is_evaluation}step_{self._account.version}"
            self._store.append(name, finished, None if is_evaluation else self._account.version)
        return assemble_batch(finished)

    def _next_unnamed(self) -> PromptId:
        self._num_unnamed += 1
        return PromptId(0, self._num_unnamed - 1)

    # Called in the event loop

    async def _enqueue(self, submissions: list[Submission]) -> None:
        self._check()
        self._queue.extend(submissions)
        self.stats.submitted += len(submissions)
        self._advance()

    async def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._advance()

    async def _set_version(self, version: int) -> None:
        self._account.move_to(version)
        self._discard([one for one in self._ready if self._account.is_overdue(one.episode.head_version)])
        self._advance()

    async def _num_prompts_wanted(self) -> int:
        """Wait until prompts are wanted, and return how many, or until a batch can be taken, and return 0."""
        batch_size = self.config.consumer_batch_size
        while True:
            self._check()
            # Asynchronous: one batch more than may start now, so that those rejected during training are replaced.
            wanted = self._account.room() + (batch_size if self.config.max_head_offpolicyness else 0)
            num_wanted = min(wanted, self._queue_size) - len(self._queue)
            if num_wanted > 0:
                return num_wanted
            if self._account.can_take(batch_size):
                return 0
            self._refuse_deadlock(batch_size)
            await self._wait_for_change(None)

    async def _collect(
        self, count: int, timeout: float | None, should_accept: ShouldAccept | None
    ) -> list[FinishedEpisode]:
        """Wait until the `count` oldest finished episodes may be consumed, and consume them."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            self._check()
            self._judge(should_accept)
            if self._account.can_take(count):
                break
            if deadline is None:
                self._refuse_deadlock(count)
            if not await self._wait_for_change(deadline):
                raise TimeoutError(
                    f"{count} episodes must finish within {timeout:g} s: got {len(self._ready)} finished, "
                    f"{self._account.running.total()} running, {len(self._queue)} waiting to start. "
                    "Call wait again: nothing is lost."
                )
        taken = heapq.nsmallest(count, self._ready, key=lambda one: (one.episode.head_version, _id_key(one.episode)))
        for one in taken:
            self._account.consume(one.episode.head_version)
        self._remove(taken)
        return taken

    async def _run_lane(self, submissions: list[Submission], oldest_version: int) -> list[FinishedEpisode]:
        """Run submissions beside the account, with a concurrency of their own."""
        self._check()
        slots = asyncio.Semaphore(self._max_concurrent)
        tasks = [asyncio.create_task(self._run_beside(submission, slots, oldest_version)) for submission in submissions]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [outcome for outcome in outcomes if outcome is not None]

    async def _run_beside(
        self, submission: Submission, slots: asyncio.Semaphore, oldest_version: int
    ) -> FinishedEpisode | None:
        async with slots:
            for attempt in range(self.config.episode_retries + 1):
                try:
                    return await self._attempt(submission, attempt, self._account.version, oldest_version)
                except Exception as error:
                    self._note_failure(submission, attempt, error)
            self._failures.check()
            return None

    async def _run_admitted(self, submission: Submission, head_version: int) -> None:
        """Run one episode of the account until it is accepted, rejected or failed."""
        for attempt in range(self.config.episode_retries + 1):
            if attempt:
                # No await since the withdrawal: nobody else may take the place.
                head_version = self._account.version
                self._account.start(head_version)
                self._advance()
            try:
                finished = await self._attempt(submission, attempt, head_version, head_version)
            except Exception as error:
                self._account.withdraw(head_version)
                self._note_failure(submission, attempt, error)
                continue
            self._settle(finished, submission, head_version)
            break
        self.stats.running -= 1
        self._advance()

    def _settle(self, finished: FinishedEpisode | None, submission: Submission, head_version: int) -> None:
        if finished is None or self._account.is_overdue(head_version):
            self._account.withdraw(head_version)
            self.stats.rejected += 1
            return
        self._account.finish(head_version)
        self._ready.append(finished)
        if submission.should_accept is None:
            self._unjudged.append(finished)
        self.stats.accepted += 1

    async def _attempt(
        self, submission: Submission, attempt: int, head_version: int, oldest_version: int
    ) -> FinishedEpisode | None:
        episode = Episode(submission.prompt_id, attempt, head_version, self.config.seed)
        timeout_s = self.config.episode_timeout
        return await run_attempt(self._engine, submission, episode, oldest_version=oldest_version, timeout_s=timeout_s)

    def _note_failure(self, submission: Submission, attempt: int, error: Exception) -> None:
        is_last = attempt == self.config.episode_retries
        logger.warning(
            "episode %s failed in attempt %d (%s), %s: %s",
            submission.prompt_id,
            attempt,
            kind_of(error),
            "dropped" if is_last else "trying again",
            describe(error),
        )
        if is_last:
            self._failures.drop(error)
            self.stats.failed += 1

    def _advance(self) -> None:
        """Start what may start, and wake every wait."""
        while self._queue and not self._is_paused and self._account.capacity() > 0:
            self._account.start(self._account.version)
            self.stats.running += 1
            self._spawn(self._run_admitted(self._queue.popleft(), self._account.version))
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_change(self, deadline: float | None) -> bool:
        """Wait for the next event; False when the caller's deadline passed, an error when nothing ever happens."""
        stalled = asyncio.get_running_loop().time() + self.config.episode_timeout + _GRACE_S
        try:
            async with asyncio.timeout_at(deadline if deadline is not None else stalled):
                await self._changed.wait()
        except TimeoutError:
            if deadline is not None:
                return False
            raise EpisodeTimeoutError(
                f"an episode must start or end every {self.config.episode_timeout + _GRACE_S:g} s: got none, with "
                f"{self._account.running.total()} running, {len(self._queue)} waiting to start, "
                f"{'paused' if self._is_paused else 'not paused'}. Call resume, or look at the workflow."
            ) from None
        return True

    def _refuse_deadlock(self, count: int) -> None:
        """Raise when nothing runs and nothing will, unless the caller resumes."""
        if self._account.running or self._is_paused:
            return
        raise RuntimeError(
            f"{count} episodes must be able to finish: got {len(self._ready)} finished, none running and "
            f"{len(self._queue)} waiting to start, of which version {self._account.version} admits "
            f"{max(0, self._account.room())} (consumed so far: {self._account.consumed}). Publish weights "
            "and call set_version, submit more episodes, or raise rollout.max_head_offpolicyness."
        )

    def _check(self) -> None:
        self._failures.check()
        if self._store is not None:
            self._store.check()

    def _judge(self, should_accept: ShouldAccept | None) -> None:
        """Apply the filter of `wait` to what has finished since."""
        if should_accept is not None:
            self._discard([one for one in self._unjudged if not should_accept(one.trajectory)])
            self._unjudged.clear()

    def _discard(self, rejected: list[FinishedEpisode]) -> None:
        """Reject finished episodes."""
        for one in rejected:
            self._account.discard(one.episode.head_version)
        self.stats.accepted -= len(rejected)
        self.stats.rejected += len(rejected)
        self._remove(rejected)
        if rejected:
            self._advance()

    def _remove(self, gone: list[FinishedEpisode]) -> None:
        gone_ids = {id(one) for one in gone}
        self._ready = [one for one in self._ready if id(one) not in gone_ids]
        self._unjudged = [one for one in self._unjudged if id(one) not in gone_ids]


def _id_key(episode: Episode) -> tuple[int, int]:
    return episode.prompt_id.epoch, episode.prompt_id.index


def _store_of(config: InferenceEngineConfig) -> RolloutStore | None:
    """Open the store of the run folder; without a fileroot there is none."""
    if not config.fileroot:
        return None
    return RolloutStore(os.path.join(config.fileroot, config.experiment_name, config.trial_name, "rollouts"))

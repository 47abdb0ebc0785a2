"""Runs episodes: admits prompts, retries failures, and hands out batches whose staleness is bounded.

All state lives in one event loop, in a thread of its own, and changes only there between two awaits: no locks. Every
change sets one event that all waits look at; nothing polls. What becomes of each prompt is noted in the `Ledger`, the
one account that capacity, staleness, metrics and recovery read; when an episode may start and a batch be taken is
decided by `StalenessAccount`. `run_all` is a lane beside it, for evaluation and synchronous batches.

Invariants: every prompt ends exactly once, as trained, rejected or failed; a wait that raises loses nothing; no wait
outlives `episode_timeout` without an event.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.api.io_struct import PromptId, RolloutStat
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.account.store import RolloutStore
from arealite.rollout.attempt import BY_FILTER, OVERDUE, FinishedEpisode, ShouldAccept, Submission
from arealite.rollout.episode import Episode
from arealite.rollout.episode_runner import EpisodeRunner
from arealite.rollout.event_loop import Errand, EventLoopThread
from arealite.rollout.failures import Budgets, kind_of
from arealite.rollout.lane import Lane
from arealite.rollout.prompts import PromptSource, Row, named
from arealite.rollout.staleness import StalenessAccount
from arealite.rollout.trajectory import assemble_batch
from arealite.utils import heartbeat

_GRACE_S = 30.0
"""Added to `episode_timeout` before a wait without any event gives up."""
_CLOSE_S = 10.0
"""How long cancelled tasks may take to end."""
_REJECTED_BATCHES = 20
"""The default of `max_rejected_in_a_row`, in batches."""
_STARTS_PER_TURN = 32
"""Episodes started in one turn of the event loop: thousands at once would keep others waiting."""
_UNNAMED_EPOCH = -1
"""Of prompts that were submitted without a `prompt_id`."""


@dataclass(frozen=True)
class Running:
    """An episode of the account that is under way."""

    submission: Submission
    episode: Episode
    task: asyncio.Task[None]


class RolloutExecutor:
    """The one account of a run's episodes, on global rank 0."""

    def __init__(self, config: InferenceEngineConfig, engine: InferenceEngine) -> None:
        self.config = config
        batch_size = config.consumer_batch_size
        self._max_concurrent = config.max_concurrent_rollouts or batch_size
        self._queue_size = config.queue_size or 16 * self._max_concurrent
        self._account = StalenessAccount(
            batch_size=batch_size,
            max_head_offpolicyness=config.max_head_offpolicyness,
            max_concurrent=self._max_concurrent,
            version=engine.get_version(),
            overdue=config.overdue,
        )
        self._budgets = Budgets(
            failure_window=config.failure_window,
            max_failed_share=config.max_failed_share,
            max_rejected_in_a_row=config.max_rejected_in_a_row or _REJECTED_BATCHES * batch_size,
        )
        self._queue: deque[Submission] = deque()
        self._running: dict[int, Running] = {}
        self._ready: list[FinishedEpisode] = []
        self._unjudged: list[FinishedEpisode] = []
        self._is_paused = False
        self._is_closed = False
        self._is_starting = False
        """More will start in the next turn of the loop."""
        self._num_unnamed = 0
        self._source: PromptSource | None = None
        self._open_prompts: list[tuple[int, PromptId]] | None = None
        """Those of the run that this one goes on from, until they are queued; None before anything ran."""
        self._changed = asyncio.Event()
        self.errand: Errand | None = None
        """What the trainer's thread does when it is wanted while it waits for episodes."""
        folder = _run_folder(config)
        self._store = None if folder is None else RolloutStore(os.path.join(folder, "rollouts"))
        self._ledger = Ledger(None if folder is None else os.path.join(folder, "ledger.sqlite"), self._account)
        self._runner = EpisodeRunner(config, engine, ledger=self._ledger, budgets=self._budgets)
        self._lane = Lane(self._runner, max_concurrent=self._max_concurrent)
        self.loop = EventLoopThread(
            "arealite-rollout", blocking_call_s=config.blocking_call_s, max_blocked_s=config.episode_timeout
        )
        heartbeat.report("prompts by state", self._totals)

    # Called by the trainer's thread

    def submit(self, row: Row, workflow: RolloutWorkflow) -> None:
        """Queue one episode and return at once."""
        if len(self._queue) >= self._queue_size:
            raise RuntimeError(
                f"at most rollout.queue_size = {self._queue_size} episodes must wait to start: got one more. "
                "Call wait, or raise queue_size."
            )
        self._begin()
        self.loop.run(self._enqueue([Submission(self._named(row), workflow)]))

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        """Return `count` accepted trajectories, oldest first."""
        return self._hand_out(self.loop.run(self._collect(count, timeout, should_accept), self.errand))

    def prepare_batch(
        self, dataloader: Iterable[list[Row]], workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        """Return the next batch of bounded staleness; prompts are pulled in the caller's thread as they are wanted."""
        if self._source is None or self._source.dataloader is not dataloader:
            self._source = PromptSource(dataloader)
        should_accept = should_accept or _accept_any  # nobody judges these later
        self._begin()
        if self._open_prompts:
            reissued = [
                Submission(self._source.fetch(prompt_id), workflow, should_accept, ticket)
                for ticket, prompt_id in self._open_prompts
            ]
            self._open_prompts = []
            self.loop.run(self._reissue(reissued))
        while num_wanted := self.loop.run(self._num_prompts_wanted(), self.errand):
            rows: list[Row] = []
            while len(rows) < num_wanted:
                rows += self._source.pull()
            submissions = [Submission(row, workflow, should_accept) for row in rows]
            self.loop.run(self._enqueue(submissions, self._source.cursor()))
        return self._hand_out(self.loop.run(self._collect(self.config.consumer_batch_size, None, None), self.errand))

    def run_all(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool = False) -> TensorDict:
        """Run one episode per row now, also while paused, and return what was accepted.

        Staleness throttles nothing here. An evaluation takes any version of the weights (a second engine may not be
        told), but one only: what other versions answered is asked again.
        """
        self._begin()
        submissions = [Submission(self._named(row), workflow) for row in rows]
        finished = self.loop.run(self._run_lane(submissions, is_evaluation), self.errand)
        if not finished:
            raise EpisodeError(
                f"at least one of {len(rows)} episodes must be accepted: got none (in this run: {self._outcomes()}). "
                "Look at the workflow and its reward."
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

    def set_capacity(self, share: float) -> None:
        """Let that share of the usual concurrency run, rounded up, as servers come and go, within what is configured
        (in the loop)."""
        max_concurrent = max(1, math.ceil(share * self._max_concurrent))
        if self.config.max_concurrent_rollouts is not None:
            max_concurrent = min(max_concurrent, self.config.max_concurrent_rollouts)
        if max_concurrent != self._account.max_concurrent:
            self._account.max_concurrent = max_concurrent
            self._lane.set_max_concurrent(max_concurrent)
            self._advance()

    @property
    def stats(self) -> RolloutStat:
        """Counts of episodes since the run began."""
        totals = self._totals()
        return RolloutStat(
            submitted=sum(totals.values()),
            accepted=totals["accepted"],
            running=totals["running"],
            rejected=totals["rejected"],
            failed=totals["failed"],
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts since the run began, by metric name."""
        totals = self._totals()
        counts = {name: totals[name] for name in ("accepted", "rejected", "running")} | self._outcomes()
        return {f"rollout/{name}": float(count) for name, count in counts.items()} | self.loop.watch.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Make everything so far durable and return what `load_state_dict` needs to go on from here."""
        self._begin()
        if self._source is not None:
            self._source.require_fetch()
        if self._store is not None:
            self._store.flush()
        state = {"version": self._account.version, "num_unnamed": self._num_unnamed}
        return state | {"ledger_position": self._ledger.flush()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what came after it is undone, and what was open then is queued again.

        That happens at the next `prepare_batch`, whose dataloader must `fetch` the prompts.
        """
        assert self._open_prompts is None, "load_state_dict must come before the first episode"
        self._open_prompts = self._ledger.rollback(state["ledger_position"])
        self._num_unnamed = state["num_unnamed"]
        if self._store is not None:
            self._store.trim(state["version"])

    def note_checkpoint(self, step: int, position: int) -> None:
        """Note that what was trained up to a step can't be undone any more."""
        self._ledger.note_checkpoint(step, position)

    def close(self) -> None:
        """Cancel what runs, end the thread and finish writing rollouts and ledger."""
        self._is_closed = True
        self.loop.close(_CLOSE_S)
        try:
            if self._store is not None:
                self._store.close()
        finally:
            self._ledger.close()

    def _begin(self) -> None:
        """Before the first episode of a run that goes on from nothing: remove what an earlier one left."""
        if self._open_prompts is None:
            self.load_state_dict({"ledger_position": 0, "version": 0, "num_unnamed": 0})

    def _hand_out(self, finished: list[FinishedEpisode], *, is_evaluation: bool = False) -> TensorDict:
        finished = sorted(finished, key=_id_key)
        if self._store is not None:
            name = f"{'eval_' * is_evaluation}step_{self._account.version}"
            self._store.append(name, finished, None if is_evaluation else self._account.version)
        return assemble_batch([one.trajectory for one in finished])

    def _named(self, row: Row) -> Row:
        self._num_unnamed += 1
        return named(row, PromptId(_UNNAMED_EPOCH, self._num_unnamed - 1))

    def _totals(self) -> dict[str, int]:
        counts = self._ledger.counts
        totals = {"issued": counts["issued"], "running": counts["running"]}
        totals["accepted"] = counts["accepted"] + counts["trained"]
        for state in ("rejected", "failed"):
            totals[state] = sum(count for name, count in counts.items() if name.startswith(f"{state}_"))
        return totals

    def _outcomes(self) -> dict[str, int]:
        """Return why episodes were rejected, failed or tried again."""
        kinds = ("rejected_", "failed_", "retried_")
        return {name: count for name, count in self._ledger.counts.items() if name.startswith(kinds) and count}

    # Called in the event loop

    async def _enqueue(self, submissions: list[Submission], cursor: Mapping[str, Any] | None = None) -> None:
        self._check()
        tickets = self._ledger.issue([one.prompt_id for one in submissions], cursor=cursor)
        self._queue.extend(dataclasses.replace(one, ticket=ticket) for one, ticket in zip(submissions, tickets))
        self._advance()

    async def _reissue(self, submissions: list[Submission]) -> None:
        self._queue.extend(submissions)
        self._advance()

    async def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._advance()

    async def _set_version(self, version: int) -> None:
        self._account.move_to(version)
        self._discard([one for one in self._ready if self._account.is_overdue(one.episode.head_version)], OVERDUE)
        if self.config.overdue == "drop":
            for ticket, running in list(self._running.items()):
                if self._account.is_overdue(running.episode.head_version):
                    del self._running[ticket]
                    self._runner.note_end(running.submission, running.episode, OVERDUE)
                    running.task.cancel()
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
                    f"{len(self._running)} running, {len(self._queue)} waiting to start. "
                    "Call wait again: nothing is lost."
                )
        taken = heapq.nsmallest(count, self._ready, key=lambda one: (one.episode.head_version, _id_key(one)))
        self._ledger.train([one.ticket for one in taken], self._account.version)
        self._budgets.accept()
        self._remove(taken)
        return taken

    def _advance(self) -> None:
        """Start what may start, some in each turn of the loop, and wake every wait."""
        if not self._is_starting:
            for _ in range(_STARTS_PER_TURN):
                if not self._may_start():
                    break
                self._start(self._queue.popleft())
            else:
                self._is_starting = True
                asyncio.get_running_loop().call_soon(self._start_more)
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_more(self) -> None:
        self._is_starting = False
        self._advance()

    def _may_start(self) -> bool:
        is_open = not (self._is_paused or self._is_closed)
        return is_open and bool(self._queue) and self._account.capacity() > 0

    def _start(self, submission: Submission) -> None:
        ticket = submission.ticket
        assert ticket is not None
        now = asyncio.get_running_loop().time()
        submission = dataclasses.replace(submission, first_started_s=submission.first_started_s or now)
        episode = self._runner.start(submission, self._account.version)
        task = asyncio.create_task(self._run(submission, episode))
        self._running[ticket] = Running(submission, episode, task)

    async def _run(self, submission: Submission, episode: Episode) -> None:
        """Run one attempt of an episode of the account, and note how it ended."""
        ticket = submission.ticket
        assert ticket is not None
        outcome = await self._runner.attempt(submission, episode, episode.head_version)
        if ticket not in self._running:
            return  # dropped meanwhile
        del self._running[ticket]
        if isinstance(outcome, Exception) and self._runner.may_retry(submission, outcome):
            self._ledger.retry(ticket, kind_of(outcome))
            self._queue.appendleft(dataclasses.replace(submission, attempt=submission.attempt + 1))
        elif isinstance(outcome, FinishedEpisode) and self._account.is_overdue(episode.head_version):
            self._runner.note_end(submission, episode, OVERDUE)
        else:
            self._runner.note_end(submission, episode, outcome)
            if isinstance(outcome, FinishedEpisode):
                self._ready.append(outcome)
                if submission.should_accept is None:
                    self._unjudged.append(outcome)
                else:
                    self._budgets.accept()
        self._advance()

    async def _run_lane(self, submissions: list[Submission], is_evaluation: bool) -> list[FinishedEpisode]:
        self._check()
        if is_evaluation:
            return await self._lane.evaluate_all(submissions)
        return await self._lane.train_all(submissions, version=self._account.version)

    # Waits

    async def _wait_for_change(self, deadline: float | None) -> bool:
        """Wait for the next event; False when the caller's deadline passed, an error when nothing ever happens."""
        stalled = asyncio.get_running_loop().time() + self.config.episode_timeout + _GRACE_S
        try:
            async with asyncio.timeout_at(deadline if deadline is not None else stalled):
                await self._changed.wait()
        except TimeoutError:
            if deadline is not None:
                return False
            if any(running.episode.num_standing for running in self._running.values()):
                return True  # they wait for servers, which has a deadline of its own
            raise EpisodeTimeoutError(
                f"an episode must start or end every {self.config.episode_timeout + _GRACE_S:g} s: got none, with "
                f"{len(self._running)} running, {len(self._queue)} waiting to start, "
                f"{'paused' if self._is_paused else 'not paused'}. Call resume, or look at the workflow."
            ) from None
        return True

    def _refuse_deadlock(self, count: int) -> None:
        """Raise when nothing runs and nothing will, unless the caller resumes."""
        if self._running or self._is_paused:
            return
        raise RuntimeError(
            f"{count} episodes must be able to finish: got {len(self._ready)} finished, none running and "
            f"{len(self._queue)} waiting to start, of which version {self._account.version} admits "
            f"{max(0, self._account.room())} (consumed so far: {self._account.consumed}). Publish weights "
            "and call set_version, submit more episodes, or raise rollout.max_head_offpolicyness."
        )

    def _check(self) -> None:
        self._budgets.check()
        self._ledger.check()
        if self._store is not None:
            self._store.check()

    def _judge(self, should_accept: ShouldAccept | None) -> None:
        """Apply the filter of `wait` to what has finished since."""
        if should_accept is not None:
            rejected = [one for one in self._unjudged if not should_accept(one.trajectory)]
            self._unjudged.clear()
            self._discard(rejected, BY_FILTER)

    def _discard(self, rejected: list[FinishedEpisode], reason: str) -> None:
        """Reject finished episodes."""
        for one in rejected:
            self._ledger.reject(one.ticket, reason)
            if reason != OVERDUE:
                self._budgets.reject(reason)
        self._remove(rejected)
        if rejected:
            self._advance()

    def _remove(self, gone: list[FinishedEpisode]) -> None:
        gone_ids = {id(one) for one in gone}
        self._ready = [one for one in self._ready if id(one) not in gone_ids]
        self._unjudged = [one for one in self._unjudged if id(one) not in gone_ids]


def _accept_any(trajectory: TensorDict) -> bool:
    return True


def _id_key(one: FinishedEpisode) -> tuple[int, int]:
    prompt_id = one.episode.prompt_id
    return prompt_id.epoch, prompt_id.index


def _run_folder(config: InferenceEngineConfig) -> str | None:
    """Return where the run's files are; without a fileroot there are none."""
    return os.path.join(config.fileroot, config.experiment_name, config.trial_name) if config.fileroot else None

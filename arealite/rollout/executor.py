"""Starts and runs episodes, and returns batches of bounded staleness, or runs a fixed list of prompts at once.

All state belongs to one event loop in its own thread and changes only there, between two awaits, so there are no locks.
Every change wakes all waits; nothing polls.

Invariants: every prompt ends exactly once, as trained, rejected or failed; a wait that raises loses nothing; a wait
without any event ends after `episode_timeout`; an evaluation has completions of one weight version only.
"""

import asyncio
import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any, TypeVar

from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.api.io_struct import PromptId, RolloutStat
from arealite.api.run_folder import RunFolder
from arealite.api.workflow_api import OutsideRows, RolloutWorkflow
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.account.store import RolloutStore
from arealite.rollout.episode import BY_FILTER, OVERDUE, Attempts, Budgets, EpisodeRunner, LocalAttempts, Outcome
from arealite.rollout.event_loop import EventLoopThread
from arealite.rollout.prompts import (
    Dataloader,
    Episode,
    Keep,
    Prompt,
    PromptSource,
    Row,
    ShouldAccept,
    external_prompt,
    named,
)
from arealite.rollout.staleness import StalenessAccount
from arealite.rollout.trajectory import assemble_batch
from arealite.utils import heartbeat, stop
from arealite.utils.background import BackgroundTasks
from arealite.utils.data_order import cursor_after

T = TypeVar("T")
logger = logging.getLogger("arealite.rollout")

_GRACE_S = 30.0  # on top of `episode_timeout`, before a wait without any event raises
_CLOSE_S = 10.0  # how long cancelled tasks may take to end
_KEPT_WINDOW = 32  # episodes, at least, by which the share of kept ones is measured
_STARTS_PER_TURN = 32  # episodes started in one turn of the event loop, so that thousands do not delay other tasks
_UNNAMED_EPOCH = -1  # epoch of prompts that were submitted without a `prompt_id`
# By numbers, which compare faster than prompt ids.
_OLDEST_FIRST = attrgetter("head_version", "prompt.prompt_id.epoch", "prompt.prompt_id.index")


class RolloutExecutor:
    """Runs all episodes of a run, on global rank 0."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        engine: InferenceEngine,
        attempts: Attempts | None = None,
        make_loop: Callable[..., EventLoopThread] = EventLoopThread,
        assemble: Callable[[list[TensorDict]], Any] = assemble_batch,
    ) -> None:
        """`attempts` runs training episodes in other processes; None runs them here, where evaluations always run. A
        simulation makes a loop that it turns in virtual time. `assemble` makes training batches of trajectories."""
        self.config, self._engine, self._batch_size = config, engine, config.consumer_batch_size
        self._assemble, self._max_concurrent = assemble, config.concurrency
        self._queue_size = config.queue_size or 16 * self._max_concurrent
        self._account = StalenessAccount(
            batch_size=self._batch_size,
            max_head_offpolicyness=config.max_head_offpolicyness,
            max_concurrent=self._max_concurrent,
            version=engine.get_version(),
            overdue=config.overdue,
        )
        run = RunFolder(config) if config.fileroot else None
        self.store = RolloutStore(None if run is None else run.rollouts, config.stored_share)
        self._ledger = Ledger(None if run is None else str(run.ledger), self._account)
        self._runner = EpisodeRunner(config, attempts or LocalAttempts(config, engine), self._ledger, Budgets(config))

        self._queue: deque[Prompt] = deque()
        self._running: dict[Episode, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks("the accounting of an episode", logger, on_failure=self._wake)
        self._ready: dict[Episode, None] = {}  # accepted, and in no batch yet
        self._kept_share = 1.0  # of recent episodes
        self._num_unthrottled = 0
        self._unthrottled: set[Episode] = set()  # attempts that run without the staleness bound
        self._changed = asyncio.Event()
        self._stalled_s = config.episode_timeout + _GRACE_S
        self._is_paused = False
        self._is_closed = False
        self._is_starting = False  # whether the next turn of the loop starts more episodes
        self._num_unnamed = 0
        self._source: PromptSource | None = None
        self._is_open = False  # whether rows come from outside, such as from online sessions
        # Open prompts of the checkpoint that the run resumed from, until queued; None before the first episode.
        self._reopened: list[Prompt] | None = None
        self.catch_up: Callable[[], None] = lambda: None  # updates joining servers, in the thread that waits
        self.are_servers_full: Callable[[], bool] = lambda: False  # then no more than a batch runs by default
        self._asked = asyncio.Event()
        self.loop = make_loop("arealite-rollout", max_blocked_s=config.episode_timeout)
        heartbeat.report("prompts by state", self._ledger.totals)

    # Called by the trainer's thread: batches

    def prepare_batch(
        self, dataloader: Dataloader, workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> Any:
        """Return the next batch of bounded staleness, pulling prompts from the dataloader in the caller's thread."""
        should_accept = should_accept or (lambda trajectory: True)
        source = self._begin_with(dataloader, workflow, should_accept)
        while num_prompts := self._wait_for(self._wait_until, self._num_wanted, self._batch_size):
            self.loop.run(self._issue(source.prompts(num_prompts, workflow, should_accept), source.cursor()))
        return self._assemble(self._hand_out(self._wait_for(self._take, self._batch_size)))

    def _num_wanted(self) -> int | None:
        """Return how many prompts to queue, 0 when a batch can be taken, None when neither is possible yet."""
        # Asynchronous training queues what replaces the rejected episodes of a batch at once, also while it trains.
        spare = math.ceil(self._batch_size / self._kept_share) if self.config.max_head_offpolicyness else 0
        num_prompts = min(self._account.room() + spare, self._queue_size) - len(self._queue)
        if num_prompts > 0 and not self._is_open:
            return num_prompts
        return 0 if self._account.can_take(self._batch_size) else None

    def submit(self, row: Row, workflow: RolloutWorkflow) -> None:
        """Queue one episode and return at once."""
        if len(self._queue) >= self._queue_size:
            raise RuntimeError(
                f"at most rollout.queue_size = {self._queue_size} episodes must wait to start: got one more. "
                "Call wait, or raise queue_size."
            )
        self._begin()
        self.loop.run(self._issue([self._new_prompt(row, workflow)]))

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        """Return `count` accepted trajectories, oldest first."""
        return assemble_batch(self._hand_out(self._wait_for(self._take, count, timeout, should_accept)))

    def run_all(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool = False) -> Any:
        """Run one episode per row now, also while paused, and return the accepted trajectories.

        The staleness bound does not apply. An evaluation accepts any single version of the weights (a second engine may
        not know the current one) and repeats episodes that saw other versions.
        """
        episodes = self._run_all(rows, workflow, is_evaluation=is_evaluation)
        assemble = assemble_batch if is_evaluation else self._assemble
        return assemble(self._hand_out(episodes, is_evaluation=is_evaluation))

    def evaluate_each(self, rows: Sequence[Row], workflow: RolloutWorkflow, keep: Keep) -> None:
        """Run one episode per row now and hand each accepted one to `keep` (in the event loop) as soon as it ends."""
        self._run_all(rows, workflow, is_evaluation=True, keep=keep)

    def _run_all(
        self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool, keep: Keep | None = None
    ) -> list[Episode]:
        self._begin()
        prompts, runner = [self._new_prompt(row, workflow) for row in rows], self._runner
        if is_evaluation:
            # An evaluation counts for the failure budgets but leaves no ledger entries.
            ledger = Ledger(None, self._account)
            here = LocalAttempts(self.config, self._engine, is_evaluation=True)
            runner = EpisodeRunner(self.config, here, ledger, runner.budgets)
            episodes = self._wait_for(self._evaluate, runner, prompts, keep)
        else:
            episodes = self._wait_for(self._train_now, prompts, self._account.version)
        causes = ", ".join(f"{name} {count}" for name, count in runner.ledger.causes().items())
        what = f"{len(rows)} {'evaluation' if is_evaluation else 'training'} prompts"
        if not episodes and keep is None:
            failures, example = runner.budgets.causes()
            raise EpisodeError(
                f"at least one of {what} must be accepted: got none ({causes}). Look at the workflow and its reward."
                f"{failures}"
            ) from example
        if is_evaluation and len(episodes) < len(rows):
            logger.warning("%d of %s have no result (%s)", len(rows) - len(episodes), what, causes)
        return episodes

    def _wait_for(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run `function` in the loop and update joining servers meanwhile. Raises RunStopped on a stop request."""
        self.ask_to_catch_up()  # servers may have joined before this wait
        pending = self.loop.submit(stop.unless_asked(function, *args))
        try:
            while True:
                wait: Any = self._until_done_or_asked(pending)
                wait.__qualname__ = function.__qualname__  # shown in a stall verdict
                if self.loop.run(wait):
                    return pending.result()
                self.catch_up()
        except stop.Interrupted:
            raise stop.stopped() from None
        finally:
            pending.cancel()  # no effect at its end

    async def _until_done_or_asked(self, pending: Future[Any]) -> bool:
        """Wait until `pending` is done or `ask_to_catch_up` was called; return whether it is done."""
        done, asked = asyncio.wrap_future(pending), asyncio.create_task(self._asked.wait())
        done.add_done_callback(lambda one: one.cancelled() or one.exception())  # raised by `pending`
        await asyncio.wait([done, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        self._asked.clear()
        return pending.done()

    def ask_to_catch_up(self) -> None:
        """Make the thread that waits for episodes, now or next, call `catch_up`; from any thread."""
        self.loop.call_soon(self._asked.set)

    def _hand_out(self, episodes: list[Episode], *, is_evaluation: bool = False) -> list[TensorDict]:
        episodes = sorted(episodes, key=attrgetter("prompt.prompt_id.epoch", "prompt.prompt_id.index"))
        trained_step = None if is_evaluation else self._account.version
        self.store.append(f"{'eval_' * is_evaluation}step_{self._account.version}", episodes, trained_step=trained_step)
        if self._source is not None and not is_evaluation:
            self._source.note_rewards({one.prompt_id: one.rewards for one in episodes})
        return [one.trajectory for one in episodes]

    def _new_prompt(self, row: Row, workflow: RolloutWorkflow) -> Prompt:
        self._num_unnamed += 1
        row = named(row, PromptId(_UNNAMED_EPOCH, self._num_unnamed - 1))
        return Prompt(row["prompt_id"], row, workflow)

    # Called by the trainer's thread: state

    def pause(self) -> None:
        """Start no new episodes."""
        self.loop.run(self._set_paused(True))

    def resume(self) -> None:
        self.loop.run(self._set_paused(False))

    def set_version(self, version: int) -> None:
        """Set the version of the weights that capacity and staleness are computed from."""
        self.loop.run(self._set_version(version))

    @property
    def stats(self) -> RolloutStat:
        """Counts of episodes since the run began."""
        totals = self._ledger.totals()
        return RolloutStat(submitted=sum(totals.values()), **{k: n for k, n in totals.items() if k != "issued"})

    def metrics(self) -> dict[str, float]:
        """Return the counts since the run began, and `reward_metrics` since the last call."""
        totals = self._ledger.totals()
        counts = {name: totals[name] for name in ("accepted", "rejected", "running")} | self._ledger.causes()
        metrics = {f"rollout/{name}": float(count) for name, count in counts.items()} | self.loop.watch.metrics()
        return metrics | ({} if self._source is None else self._source.metrics()) | self._runner.reward_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Flush rollouts and ledger to disk and return the state for `load_state_dict`."""
        self._begin()
        if self._source is not None:
            self._source.require_fetch()
        self.store.flush()
        position = self._ledger.flush()
        return {"version": self._account.version, "num_unnamed": self._num_unnamed, "ledger_position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Roll back to a checkpoint; the next `prepare_batch` fetches and queues the prompts that were open then."""
        assert self._reopened is None, "load_state_dict must come before the first episode"
        self._reopened = self._ledger.rollback(state["ledger_position"])
        self._num_unnamed = state["num_unnamed"]
        self.store.trim(state["version"])

    def note_checkpoint(self, step: int, position: int) -> None:
        """Record a published checkpoint: prompts trained up to `step` are final."""
        self._ledger.note_checkpoint(step, position)

    def close(self) -> None:
        """Cancel running episodes, end the thread, and finish writing rollouts and ledger."""
        self._is_closed = True
        self.loop.close(_CLOSE_S)
        try:
            self.store.close()
        finally:
            self._ledger.close()

    def _begin(self) -> None:
        """Remove the ledger and rollouts of an earlier run before the first episode, unless this run resumes."""
        if self._reopened is None:
            self.load_state_dict({"ledger_position": 0, "version": 0, "num_unnamed": 0})

    def _begin_with(
        self, dataloader: Dataloader, workflow: RolloutWorkflow, should_accept: ShouldAccept
    ) -> PromptSource:
        """Return the source of this dataloader, after queueing what it must fetch again for a run that resumes."""
        self._source = (self._source or PromptSource(dataloader)).of(dataloader)
        self._begin()
        if self._reopened:
            fetch = self._source.require_fetch()
            for prompt in self._reopened:
                prompt.row, prompt.workflow, prompt.should_accept = fetch(prompt.prompt_id), workflow, should_accept
            reopened, self._reopened = self._reopened, []
            self.loop.run(self._enqueue(reopened))
        if isinstance(dataloader, OutsideRows) and not self._is_open:
            self._is_open = True
            admit = lambda row: self.loop.submit(self._admit(row, workflow, should_accept))  # noqa: E731
            dataloader.open(admit, episode_timeout=self.config.episode_timeout)
        return self._source

    # In the event loop: start an episode, run it, record its end

    async def _issue(self, prompts: list[Prompt], cursor: Mapping[str, Any] | None = None) -> None:
        self._check()
        self._ledger.issue(prompts, cursor=cursor)
        await self._enqueue(prompts)

    async def _admit(self, row: Row, workflow: RolloutWorkflow, should_accept: ShouldAccept) -> bool:
        """Start an episode for an external row; return False if there is no capacity."""
        if self._queue or self._is_paused or self._is_closed or self._account.capacity() <= 0:
            return False
        number = self._ledger.num_issued
        await self._issue([external_prompt(number, row, workflow, should_accept)], cursor_after(number + 1))
        return True

    async def _enqueue(self, prompts: list[Prompt]) -> None:
        self._queue.extend(prompts)
        self._advance()

    def _advance(self) -> None:
        """Start queued episodes up to the capacity, a few per turn of the loop, and wake every wait."""
        if not (self._is_starting or self._is_paused or self._is_closed) and (count := self._num_to_start()) > 0:
            for _ in range(count):
                episode = self._runner.start(self._queue.popleft(), self._account.version)
                self._running[episode] = self._tasks.start(self._run(episode))
            self._is_starting = True
            asyncio.get_running_loop().call_soon(self._start_more)
        self._wake()

    def _num_to_start(self) -> int:
        """Return how many episodes to start in this turn of the loop: above a batch, by default, while servers have
        room, which is known once the requests of an earlier turn have come to them."""
        is_above = len(self._running) >= self._batch_size and self.config.max_concurrent_rollouts is None
        if is_above and self.are_servers_full():
            return 0
        return min(len(self._queue), self._account.capacity(), self._batch_size, _STARTS_PER_TURN)

    def _wake(self) -> None:
        self._changed.set()  # wakes current waits only
        self._changed.clear()

    def _start_more(self) -> None:
        self._is_starting = False
        self._advance()

    async def _run(self, episode: Episode) -> None:
        outcome: Outcome = await self._runner.run(episode)
        if episode not in self._running:
            return  # `_set_version` has dropped it
        if isinstance(outcome, TensorDict) and self._account.is_overdue(episode.head_version):
            outcome = OVERDUE
        runs_again = self._runner.end(episode, outcome)
        del self._running[episode]  # after `end`: if that raises, a waiting caller gets its error, not "none running"
        if not runs_again:
            is_kept = isinstance(outcome, TensorDict)
            self._kept_share += (is_kept - self._kept_share) / max(_KEPT_WINDOW, self._batch_size)
        if runs_again:
            self._queue.appendleft(episode.prompt)
        elif isinstance(outcome, TensorDict):
            self._ready[episode] = None
            if episode.prompt.should_accept is not None:  # else a filter of `wait` may still reject it
                self._runner.budgets.accept()
        elif isinstance(outcome, BaseException):
            self._runner.budgets.fail(outcome)
        self._advance()

    async def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._advance()

    async def _set_version(self, version: int) -> None:
        self._account.set_version(version)
        overdue = set(filter(self._account.is_overdue, {one.head_version for one in self._ready}))
        self._reject([one for one in self._ready if one.head_version in overdue], OVERDUE)
        if self.config.overdue == "drop":
            for episode in [one for one in self._running if self._account.is_overdue(one.head_version)]:
                task = self._running.pop(episode)
                self._runner.end(episode, OVERDUE)
                task.cancel()
        self._advance()

    def set_capacity(self, share: float) -> None:
        """Limit concurrency to a share of its default, rounded up, and to the configured maximum (in the loop)."""
        max_concurrent = max(1, math.ceil(share * self._max_concurrent))
        if self.config.max_concurrent_rollouts is not None:
            max_concurrent = min(max_concurrent, self.config.max_concurrent_rollouts)
        if max_concurrent != self._account.max_concurrent:
            self._account.max_concurrent = max_concurrent
            self._advance()

    # In the event loop: take a batch

    async def _take(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> list[Episode]:
        """Wait until the `count` oldest finished episodes may be consumed, and consume them."""

        def can_take() -> bool | None:
            if should_accept is not None:
                self._filter(should_accept)
            return self._account.can_take(count) or None

        await self._wait_until(can_take, count, timeout)
        episodes = heapq.nsmallest(count, self._ready, key=_OLDEST_FIRST)  # `_set_version` has dropped overdue ones
        for episode in episodes:
            del self._ready[episode]
        self._ledger.train([one.prompt for one in episodes], self._account.version)
        self._runner.budgets.accept()
        return episodes

    def _filter(self, should_accept: ShouldAccept) -> None:
        """Apply the filter of `wait` to episodes that it has not judged yet."""
        unjudged = [one for one in self._ready if one.prompt.should_accept is None]
        rejected = [one for one in unjudged if not should_accept(one.trajectory)]
        for episode in unjudged:
            episode.prompt.should_accept = should_accept
        self._reject(rejected, BY_FILTER)

    def _reject(self, episodes: list[Episode], reason: str) -> None:
        for episode in episodes:
            self._ledger.drop(episode.prompt, "rejected", reason)
            self._runner.budgets.reject(reason)
            del self._ready[episode]
        if episodes:
            self._advance()

    # In the event loop: run all prompts of a list now

    async def _train_now(self, prompts: list[Prompt], version: int) -> list[Episode]:
        """Run episodes and mark the accepted ones as trained at this version."""
        episodes = await self._run_now(self._runner, prompts, head_version=version)
        self._ledger.train([one.prompt for one in episodes], version)
        return episodes

    async def _evaluate(self, runner: EpisodeRunner, prompts: list[Prompt], keep: Keep | None) -> list[Episode]:
        """Run evaluation episodes, and repeat those that did not see the newest weights.

        With `keep`, each accepted episode is passed to it and its trajectory is dropped; nothing is repeated.
        """
        episodes = await self._run_now(runner, prompts, head_version=0, keep=keep)
        if keep is not None:
            return episodes
        newest = max((version for one in episodes for version in _versions(one)), default=0)
        outdated = {one: one.prompt for one in episodes if _versions(one) - {newest}}
        if not outdated:
            return episodes
        logger.warning("%d evaluation episodes saw older weights than %d: they run again", len(outdated), newest)
        prompts = [Prompt(one.prompt_id, one.row, one.workflow, attempt=one.attempt) for one in outdated.values()]
        again = await self._run_now(runner, prompts, head_version=0)
        if others := {version for one in again for version in _versions(one)} - {newest}:
            raise EpisodeError(
                f"an evaluation must use one version of the weights: got {newest} and {sorted(others)}. "
                "Publish weights to every server, and not during an evaluation."
            )
        return [one for one in episodes if one not in outdated] + again

    async def _run_now(
        self, runner: EpisodeRunner, prompts: list[Prompt], *, head_version: int, keep: Keep | None = None
    ) -> list[Episode]:
        """Return the accepted episodes; the first error cancels all others."""
        runner.ledger.issue(prompts, cursor=None, is_counted=False)
        tasks: list[asyncio.Task[Episode | None]] = []
        running: set[asyncio.Task[Episode | None]] = set()
        errors: list[BaseException] = []

        def end(task: asyncio.Task[Episode | None]) -> None:
            self._num_unthrottled -= 1
            running.remove(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                errors.append(error)
            self._wake()

        try:
            for prompt in prompts:
                while self._num_unthrottled >= self._account.max_concurrent:
                    await self._wait_for_change(self._unthrottled)
                if errors:
                    break
                runner.check()
                self._num_unthrottled += 1
                tasks.append(task := asyncio.create_task(self._run_to_the_end(runner, prompt, head_version, keep)))
                running.add(task)
                task.add_done_callback(end)
            while running and not errors:
                await self._wait_for_change(self._unthrottled)
            if errors:
                raise errors[0]
            return [one for task in tasks if (one := task.result()) is not None]
        finally:
            for task in tasks:
                task.cancel()

    async def _run_to_the_end(
        self, runner: EpisodeRunner, prompt: Prompt, head_version: int, keep: Keep | None
    ) -> Episode | None:
        """Run a prompt with its retries; return the accepted episode, or None."""
        runs_again = True
        while runs_again:
            episode = runner.start(prompt, head_version)
            self._unthrottled.add(episode)
            try:
                outcome = await runner.run(episode)
            finally:
                self._unthrottled.remove(episode)
            runs_again = runner.end(episode, outcome)
            self._wake()
        if isinstance(outcome, BaseException | str):
            runner.budgets.check()
            return None
        runner.budgets.accept()
        if keep is not None:
            keep(episode)
            del episode.trajectory
        return episode

    # In the event loop: waits

    async def _wait_until(self, look: Callable[[], T | None], count: int, timeout: float | None = None) -> T:
        """Wait until `look()` is not None and return its value; the caller wants `count` episodes."""
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while True:
            self._check()
            if (result := look()) is not None:
                return result
            if deadline is None and not self._running and not self._is_paused and not self._is_open:
                raise RuntimeError(
                    f"{count} episodes must be able to finish: got {len(self._ready)} finished, none running and "
                    f"{len(self._queue)} waiting to start, of which version {self._account.version} admits "
                    f"{max(0, self._account.room())} (consumed so far: {self._account.consumed}). Publish weights "
                    "and call set_version, submit more episodes, or raise rollout.max_head_offpolicyness."
                )
            if deadline is None:
                await self._wait_for_change(self._running)
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise TimeoutError(
                    f"{count} episodes must finish within {timeout:g} s: got {len(self._ready)} finished, "
                    f"{len(self._running)} running, {len(self._queue)} waiting to start. Call wait again: nothing is "
                    "lost."
                ) from None

    async def _wait_for_change(self, running: Iterable[Episode]) -> None:
        """Wait until an episode starts or ends, or state changes; raise if there is no change for too long."""
        try:
            async with asyncio.timeout(self._stalled_s):
                await self._changed.wait()
        except TimeoutError:
            # Requests that wait for a server have their own deadline.
            if not any(one.has_time for one in running):
                num_running = len(self._running) + len(self._unthrottled)
                raise EpisodeTimeoutError(
                    f"an episode must start or end every {self._stalled_s:g} s: got none, with {num_running} running, "
                    f"{len(self._queue)} waiting to start, {'paused' if self._is_paused else 'not paused'}. Call "
                    "resume, or look at the workflow: its deadline cancels it, which it must not catch."
                ) from None

    def _check(self) -> None:
        self._tasks.check()
        self._runner.check()
        self.store.check()


def _versions(episode: Episode) -> set[int]:
    trajectory = episode.trajectory
    return set(trajectory["versions"][trajectory["loss_mask"].bool()].tolist())

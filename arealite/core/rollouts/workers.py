"""The master's side of rollout workers: assigns attempts, sends the view of the servers, replaces lost workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from arealite.api.errors import GroupLostError, WorkerLostError
from arealite.core.batch import unpack
from arealite.core.rollouts.worker import Report, RolloutSpec, RolloutWorker, ServerStatus
from arealite.core.world import PLACE_S, actor_of, cause_of_death
from arealite.inference.completions import Completions
from arealite.inference.remote_engine import ClientView
from arealite.rollout.episode import Episode, Outcome
from arealite.utils import heartbeat
from arealite.utils.background import BackgroundTasks

logger = logging.getLogger("arealite.core")

_FOLLOW_S = 60.0  # in which a worker must apply a view: it only sets variables
_FOLLOW_SHARE = 0.25  # of the timeout of a weight update, which must not fail because of one worker
_CLOSE_S = 15.0  # in which workflows close


@dataclass(eq=False)
class _Worker:
    """The master's record of a worker."""

    actor: Any
    name: str
    episodes: set[Episode] = field(default_factory=set)
    follows: bool = False  # it has a view, so it gets episodes
    status: ServerStatus = field(default_factory=ServerStatus)


class RolloutWorkers:
    """The workers of a run; used in the event loop of the master's rollouts."""

    def __init__(self, spec: RolloutSpec, note_incident: Callable[[str], None]) -> None:
        self._spec, self._note_incident = spec, note_incident
        self._workers: list[_Worker] = []  # including workers that start
        self._num_lost = 0  # since the last checkpoint
        self._error: BaseException | None = None  # ended all workers
        self._tasks = BackgroundTasks("looking after a rollout worker", logger)
        self._changed = asyncio.Event()

    async def start(self, view: ClientView, secret: str | None, completions: Completions) -> None:
        """Start all workers, and wait until they are ready."""
        self._secret, self._completions, self._view = secret, completions, view
        for number in range(self._spec.num):
            self._tasks.start(self._bring(f"rollout-{number}"))
        with heartbeat.waiting(f"{self._spec.num} rollout workers to start", on="ranks"):
            while len(self._ready()) < self._spec.num:
                await self._changed.wait()
                self._check()

    def _ready(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.follows]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # every episode raises it

    async def _bring(self, name: str) -> None:
        """Start a worker, send it the newest view, and follow its view of the servers until it ends."""
        worker = _Worker(self._spawn(name), name)
        self._workers.append(worker)
        shown: ClientView | None = None
        try:
            async with asyncio.timeout(PLACE_S):
                while shown is not self._view:
                    shown = self._view
                    await worker.actor.follow.remote(shown)
            worker.follows = True
            self._wake()
            while True:
                worker.status = await worker.actor.server_status.remote(worker.status)
                self._completions.servers.note_lost(worker.status.lost)
                self._stop_clocks(worker)
        except RayTaskError as error:  # a replacement would fail too: creation failed, or user code blocks
            self._end(error.cause)
        except (RayError, TimeoutError) as error:
            self._replace(worker, error)

    def _spawn(self, name: str) -> Any:
        """Start the actor of a worker on any node."""
        spec, config = self._spec, self._spec.config
        num_calls = 2 * (config.max_concurrent_rollouts or config.consumer_batch_size) + 8
        options = {"num_cpus": 0, "max_concurrency": num_calls, "scheduling_strategy": "SPREAD"}
        return actor_of(RolloutWorker, spec.env, **options).remote(spec, name, self._secret)

    def _stop_clocks(self, worker: _Worker) -> None:
        """Stop the deadlines of a worker's episodes while it has no servers."""
        for episode in worker.episodes:
            episode.num_waiting_for_servers = int(not worker.status.has_servers)

    async def show(self, view: ClientView) -> None:
        """Send a view to every ready worker; replace workers that do not apply it in time."""
        self._view = view
        timeout_s = min(_FOLLOW_S, _FOLLOW_SHARE * view.update_timeout_s)

        async def obeyed(worker: _Worker) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await worker.actor.follow.remote(self._view)
            except (RayError, TimeoutError) as error:
                self._replace(worker, error)

        with heartbeat.waiting("rollout workers to obey", on="rollout"):
            await asyncio.gather(*(obeyed(worker) for worker in self._ready()))
        self._check()

    async def run(self, episode: Episode) -> Outcome:
        """Run an episode on the worker with the fewest episodes."""
        self._check()
        while not (ready := self._ready()):  # starting workers have a deadline
            await self._changed.wait()
            self._check()
        worker = min(ready, key=lambda worker: len(worker.episodes))
        reply = worker.actor.run.remote(episode.prompt_id, episode.prompt.row, episode.attempt, episode.head_version)
        worker.episodes.add(episode)
        self._stop_clocks(worker)
        try:
            report: Report = await reply
        except asyncio.CancelledError:
            ray.cancel(reply)
            raise
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            self._replace(worker, error)
            self._check()
            return WorkerLostError(f"a rollout worker must not end while its episodes run: {cause_of_death(error)}")
        finally:
            worker.episodes.discard(episode)
        self._completions.count(*report.counts)
        episode.samples, episode.rewards = report.samples, report.rewards
        episode.servers, episode.table = report.servers, report.table
        return unpack(report.outcome) if isinstance(report.outcome, dict) else report.outcome

    def _replace(self, worker: _Worker, error: BaseException) -> None:
        """Replace a lost worker, unless it was replaced already."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        worker.follows = False
        ray.kill(worker.actor)
        self._num_lost += 1
        cause = cause_of_death(error) or type(error).__name__
        what = f"{worker.name} is lost with {len(worker.episodes)} episodes: {cause}"
        if self._num_lost > self._spec.max_restarts:
            self._end(
                GroupLostError(
                    f"rollout workers must stay: got {what}, after {self._spec.max_restarts} restarts since the last "
                    "checkpoint (workers.restarts). Look at its log."
                )
            )
            return
        logger.warning("%s; they are issued again", what)
        self._note_incident(f"rollout worker {what}; another one takes its place, and they are issued again")
        self._tasks.start(self._bring(worker.name))

    def _end(self, error: BaseException) -> None:
        """Fail every pending attempt with `error`, and stop the workers."""
        self._error = self._error or error
        self._kill()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()  # wakes only current waiters
        self._changed.clear()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            ray.kill(worker.actor)

    def note_checkpoint(self) -> None:
        """Reset the count of lost workers."""
        self._num_lost = 0

    def close(self) -> None:
        """Stop the workers after their workflows are closed."""
        if closing := [worker.actor.close.remote() for worker in self._ready()]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        self._kill()

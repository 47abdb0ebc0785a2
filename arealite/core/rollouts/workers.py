"""Rollout workers as the master sees them: who runs an attempt, who is shown the servers, and who is replaced."""

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
from arealite.core.rollouts.worker import News, Report, RolloutSpec, RolloutWorker
from arealite.core.world import PLACE_S, actor_of, cause_of_death
from arealite.inference.completions import Completions
from arealite.inference.remote_engine import ClientView
from arealite.rollout.episode import Episode, Outcome
from arealite.utils import heartbeat
from arealite.utils.tasks import BackgroundTasks

logger = logging.getLogger("arealite.core")

_SHOW_S = 60.0  # in which a worker obeys a view, or counts as lost: it only sets variables
_SHOW_SHARE = 0.25  # of the time of a weight update, which must not fail for one worker
_CLOSE_S = 15.0  # for a workflow to end what it holds


@dataclass(eq=False)
class _Worker:
    """One worker as the master sees it."""

    actor: Any
    name: str
    episodes: set[Episode] = field(default_factory=set)
    obeys: bool = False  # gets episodes once it does
    news: News = field(default_factory=News)


class RolloutWorkers:
    """The workers as the master sees them; used in the event loop of its rollouts."""

    def __init__(self, spec: RolloutSpec, note_incident: Callable[[str], None]) -> None:
        self._spec, self._note_incident = spec, note_incident
        self._workers: list[_Worker] = []  # also those that start
        self._num_lost = 0  # since the last checkpoint
        self._error: BaseException | None = None  # that ended them all
        self._tasks = BackgroundTasks("looking after a rollout worker", logger)
        self._changed = asyncio.Event()

    async def start(self, view: ClientView, secret: str | None, completions: Completions) -> None:
        """Start all workers, and wait until they are there."""
        self._secret, self._completions, self._view = secret, completions, view
        for number in range(self._spec.num):
            self._tasks.start(self._bring(f"rollout-{number}"))
        with heartbeat.waiting(f"{self._spec.num} rollout workers to start", on="ranks"):
            while len(self._ready()) < self._spec.num:
                await self._changed.wait()
                self._check()

    def _ready(self) -> list[_Worker]:
        return [one for one in self._workers if one.obeys]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)  # it is raised by every episode

    async def _bring(self, name: str) -> None:
        """Start a worker, show it the newest view, and listen to its news for as long as it lives."""
        worker = _Worker(self._spawn(name), name)
        self._workers.append(worker)
        shown: ClientView | None = None
        try:
            async with asyncio.timeout(PLACE_S):
                while shown is not self._view:
                    shown = self._view
                    await worker.actor.follow.remote(shown)
            worker.obeys = True
            self._wake()
            while True:
                worker.news = await worker.actor.news.remote(worker.news)
                self._completions.servers.note_lost(worker.news.lost)
                self._stop_clocks(worker)
        except RayTaskError as error:  # it can't be made, or user's code blocks it: so would another one
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
        """Let episodes of a worker without servers take longer than usual, as their own clocks do."""
        for episode in worker.episodes:
            episode.num_waiting_for_servers = int(not worker.news.has_servers)

    async def show(self, view: ClientView) -> None:
        """Return when every worker with episodes obeys the view; one that does not is replaced."""
        self._view = view
        timeout_s = min(_SHOW_S, _SHOW_SHARE * view.update_timeout_s)

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
        """Let the worker with the fewest episodes run one."""
        self._check()
        while not (ready := self._ready()):  # each that starts has a deadline
            await self._changed.wait()
            self._check()
        worker = min(ready, key=lambda one: len(one.episodes))
        answer = worker.actor.run.remote(episode.prompt_id, episode.prompt.row, episode.attempt, episode.head_version)
        worker.episodes.add(episode)
        self._stop_clocks(worker)
        try:
            report: Report = await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
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
        """Start another worker in the place of one that is lost, whoever notices it first."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        worker.obeys = False
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
        """Let whoever waits for a worker fail."""
        self._error = self._error or error
        self._kill()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()  # wakes those who wait now, not later ones
        self._changed.clear()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            ray.kill(worker.actor)

    def note_checkpoint(self) -> None:
        """Count restarts from here on."""
        self._num_lost = 0

    def close(self) -> None:
        """End the workers, once their workflows have ended what they hold."""
        if closing := [one.actor.close.remote() for one in self._ready()]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        self._kill()

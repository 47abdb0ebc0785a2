"""Rollout workers as the master sees them: who runs an attempt, who is shown the servers, and who is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import GroupLostError, WorkerLostError
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.batch import unpack
from arealite.core.rollouts.worker import Report, RolloutWorker
from arealite.core.world import AT_START, PLACE_S, cause_of_death
from arealite.inference.remote_engine import ClientView
from arealite.rollout.episode import Episode, Outcome
from arealite.rollout.prompts import ShouldAccept
from arealite.utils import heartbeat

logger = logging.getLogger("arealite.core")

_SHOW_S = 60.0  # in which a worker obeys a view, or counts as lost: it only sets variables


class RolloutWorkers:
    """The workers as the master sees them; used in the event loop of its rollouts."""

    def __init__(
        self,
        num: int,
        spawn: Callable[[str, str | None], Any],
        *,
        max_restarts: int,
        note_incident: Callable[[str], None],
    ) -> None:
        """`spawn` starts the actor of a name, with the run's secret."""
        self._spawn, self._max_restarts, self._note_incident = spawn, max_restarts, note_incident
        self._num = num
        self._running: dict[Any, int] = {}  # episodes by actor
        self._names: dict[Any, str] = {}
        self._num_lost = 0  # since the last checkpoint
        self._is_closed = False

    async def start(self, view: ClientView, secret: str | None, count: Callable[[int, int], None]) -> None:
        """Start all workers, and wait until they are there."""
        self._secret, self._count, self._view = secret, count, view
        for number in range(self._num):
            self._add(f"rollout-{number}")
        with heartbeat.waiting(f"{self._num} rollout workers to start", on="ranks"):
            await self._follow(PLACE_S)

    def _add(self, name: str) -> None:
        actor = self._spawn(name, self._secret)
        self._running[actor], self._names[actor] = 0, name
        actor.follow.remote(self._view)

    async def show(self, view: ClientView) -> None:
        """Return when every worker obeys the view; one that does not is replaced."""
        self._view = view
        await self._follow(_SHOW_S)

    async def _follow(self, timeout_s: float) -> None:
        async def obeyed(actor: Any) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await actor.follow.remote(self._view)
            except (RayError, TimeoutError) as error:
                self._replace(actor, error)

        await asyncio.gather(*(obeyed(actor) for actor in list(self._running)))

    async def run(self, episode: Episode) -> Outcome:
        """Let the worker with the fewest episodes run one."""
        actor = min(self._running, key=lambda one: self._running[one])
        self._running[actor] += 1
        answer = actor.run.remote(episode.prompt_id, episode.prompt.row, episode.attempt, episode.head_version)
        try:
            report: Report = await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayActorError as error:
            self._replace(actor, error)
            return WorkerLostError(f"a rollout worker must not end while its episodes run: {cause_of_death(error)}")
        finally:
            if actor in self._running:
                self._running[actor] -= 1
        self._count(*report.counts)
        episode.samples, episode.rewards = report.samples, report.rewards
        episode.servers, episode.table = report.servers, report.table
        return unpack(report.outcome) if isinstance(report.outcome, dict) else report.outcome

    def _replace(self, actor: Any, error: BaseException) -> None:
        """Start another worker in the place of one that is lost, whoever notices it first."""
        if actor not in self._running or self._is_closed:
            return
        ray.kill(actor)
        num_running, name = self._running.pop(actor), self._names.pop(actor)
        self._num_lost += 1
        what = f"{name} is lost with {num_running} episodes: {cause_of_death(error) or type(error).__name__}"
        if self._num_lost > self._max_restarts:
            raise GroupLostError(
                f"rollout workers must stay: got {what}, after {self._max_restarts} restarts since the last checkpoint "
                "(workers.restarts). Look at its log."
            )
        logger.warning("%s; they are issued again", what)
        self._note_incident(f"rollout worker {what}; another one takes its place, and they are issued again")
        self._add(name)

    def note_checkpoint(self) -> None:
        """Count restarts from here on."""
        self._num_lost = 0

    def close(self) -> None:
        """End the workers."""
        self._is_closed = True
        for actor in self._running:
            ray.kill(actor)


def spawn(
    name: str,
    secret: str | None,
    *,
    env: Mapping[str, str],
    log_folder: Path | None,
    config: InferenceEngineConfig,
    make_workflow: Callable[[], RolloutWorkflow],
    should_accept: ShouldAccept | None,
) -> Any:
    """Start a worker on any node."""
    at_start = {key: value for key, value in env.items() if key.startswith(AT_START)}
    others = {key: value for key, value in env.items() if key not in at_start}
    at_start |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # with rewards' files
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 2 * (config.max_concurrent_rollouts or config.consumer_batch_size) + 8,
        "scheduling_strategy": "SPREAD",
        "runtime_env": {"env_vars": at_start},
    }
    log = None if log_folder is None else str(log_folder / f"{name}.log")
    actor = ray.remote(RolloutWorker).options(**options)
    return actor.remote(name, log, others, config, make_workflow, should_accept, secret)

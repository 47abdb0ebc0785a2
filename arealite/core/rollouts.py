"""Episodes on separate workers, for runs whose episodes exceed the capacity of one process.

A rollout worker is a Ray actor with an event loop, a client and a workflow with its reward processes. The account stays
in the master: it starts prompts, and receives records. Trajectories stay in Ray's store, where ranks fetch them, and so
do their rows of the rollout files, which workers write. Invariants: the master gets no tokens of an episode; workers
follow the master's view of the servers, and send no request between a hold and its release, so versions mean
the same as in one process; an episode whose worker died is issued again.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError, RayTaskError
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import GroupLostError, WorkerLostError
from arealite.api.io_struct import PromptId
from arealite.api.script import users_code
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.batch import by_need, rows_at
from arealite.core.worker import portable, write_output_to
from arealite.core.world import PLACE_S, actor_of, cause_of_death
from arealite.inference.completions import Completions
from arealite.inference.remote_engine import ClientView, RemoteInferenceEngine
from arealite.rollout.account.rollout_file import write_batch
from arealite.rollout.account.store import table_of
from arealite.rollout.episode import LocalAttempts, Outcome
from arealite.rollout.executor import RolloutExecutor
from arealite.rollout.prompts import Episode, Prompt, Row, SampleRecord, ShouldAccept
from arealite.rollout.trajectory import Record, packed_alone
from arealite.utils import heartbeat
from arealite.utils.background import BackgroundTasks
from arealite.utils.packed import Piece, longest_row, pack, unpack
from arealite.utils.processes import raise_file_limit

logger = logging.getLogger("arealite.core")

_FOLLOW_S = 60.0  # in which a worker must apply a view: it only sets variables
_FOLLOW_SHARE = 0.25  # of the timeout of a weight update, which must not fail because of one worker
_CLOSE_S = 15.0  # in which workflows close


@dataclass(frozen=True)
class RolloutSpec:
    """Settings of rollout workers."""

    num: int
    config: InferenceEngineConfig
    make_workflow: Callable[[], RolloutWorkflow]
    should_accept: ShouldAccept | None
    env: Mapping[str, str] = field(repr=False)  # may hold secrets
    log_folder: Path
    max_restarts: int  # between two checkpoints


@dataclass(frozen=True)
class Report:
    """Result of an attempt; of a trajectory, what makes a `Record`."""

    outcome: Piece | str | BaseException
    samples: list[SampleRecord]
    rewards: list[float]
    servers: set[str]
    counts: tuple[int, int]  # tokens sampled since the last report, and those with a stale KV cache
    widths: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    longest: int = 0


@dataclass(frozen=True)
class ServerStatus:
    """A worker's view of the servers."""

    lost: frozenset[tuple[str, int]] = frozenset()  # addresses, and the weight versions that they lost
    has_servers: bool = True  # at least one server is healthy


class _Client(RemoteInferenceEngine):
    """Samples from the servers in the master's view; its executor only provides an event loop."""

    def __init__(self, config: InferenceEngineConfig, secret: str | None) -> None:
        super().__init__(config.new(fileroot=""))
        self._changed = asyncio.Event()
        self._executor = RolloutExecutor(self.config, self)
        self.loop = self._executor.loop
        self.loop.run(self._start(secret))

    async def _start(self, secret: str | None) -> None:
        await self._open(secret).load_vocabulary()

    async def follow(self, view: ClientView) -> None:
        """Apply the master's view."""
        completions = self._completions
        self._version, completions.update_timeout_s = view.version, view.update_timeout_s
        completions.backend = view.backend
        self.servers.mirror(view.servers)
        (completions.may_generate.set if view.may_generate else completions.may_generate.clear)()

    def _note_change(self) -> None:
        super()._note_change()
        self._changed.set()  # wakes only current waiters
        self._changed.clear()

    async def server_status(self, known: ServerStatus) -> ServerStatus:
        """Wait until this worker's view of the servers differs from `known`, and return it."""
        while (status := ServerStatus(self.servers.lost(), bool(self.servers.serving))) == known:
            await self._changed.wait()
        return status

    def take_counts(self) -> tuple[int, int]:
        """Return and reset the numbers of sampled tokens."""
        completions = self._completions
        counts = completions.num_tokens, completions.num_stale_kv_tokens
        completions.num_tokens = completions.num_stale_kv_tokens = 0
        return counts


class RolloutWorker:
    """The actor; its methods run concurrently."""

    def __init__(self, spec: RolloutSpec, name: str, secret: str | None) -> None:
        os.environ.update(spec.env)
        raise_file_limit()
        write_output_to(spec.log_folder / f"{name}.log")
        heartbeat.start(name)
        self._error: BaseException | None = None  # from creating the client or the workflow
        try:
            self._client = _Client(spec.config, secret)
            self._workflow, self._should_accept = spec.make_workflow(), spec.should_accept
            self._tokenizer = copy.deepcopy(getattr(self._workflow, "tokenizer", None))  # for this thread
        except Exception as error:  # Ray would report a dead process
            traceback.print_exc()
            self._error = portable(error)
            return
        self._attempts = LocalAttempts(spec.config, self._client)

    async def follow(self, view: ClientView) -> None:
        """Apply the master's view. Raises the error of a worker that could not be created."""
        if self._error is not None:
            raise self._error
        await self._in_loop(self._client.follow(view))

    async def server_status(self, known: ServerStatus) -> ServerStatus:
        """Wait for a new view of the servers and return it. Raises if user code blocks the event loop."""
        loop = self._client.loop
        changed: asyncio.Future[Any] = asyncio.wrap_future(loop.submit(self._client.server_status(known)))
        given_up: asyncio.Future[Any] = asyncio.wrap_future(loop.watch.given_up)
        await asyncio.wait([changed, given_up], return_when=asyncio.FIRST_COMPLETED)
        status: ServerStatus = changed.result() if changed.done() else given_up.result()
        return status

    async def close(self) -> None:
        """Stop all episodes and close the workflow."""
        self._client.destroy()
        getattr(self._workflow, "close", lambda: None)()

    async def run(self, prompt_id: PromptId, row: Row, attempt: int, head_version: int) -> tuple[Any, ...]:
        """Run one attempt at a prompt; return a report and, of a trajectory, two pieces and its rows of the rollout
        file, which Ray keeps on this node."""
        return await self._in_loop(
            self._run(Prompt(prompt_id, row, self._workflow, self._should_accept), attempt, head_version)
        )

    async def _in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(self._client.loop.submit(coroutine))

    async def write(self, path: Path, trained_step: int | None, *tables: pa.Table) -> None:
        """Write the rollout file of a batch."""
        await asyncio.to_thread(write_batch, path, tables, trained_step)

    async def _run(self, prompt: Prompt, attempt: int, head_version: int) -> tuple[Any, ...]:
        config = self._attempts.config
        episode = Episode(prompt, attempt, head_version, config.seed)
        try:
            outcome = await self._attempts.run(episode)
        except (KeyboardInterrupt, SystemExit) as error:
            raise RuntimeError(f"a workflow must not end its process: got {error!r}") from error
        if isinstance(outcome, BaseException):
            if lines_of_user := users_code(outcome):
                outcome.add_note("\n".join(["on a rollout worker:", *lines_of_user]))
            outcome = portable(outcome)
        told = episode.samples, episode.rewards, episode.servers, self._client.take_counts()
        if not isinstance(outcome, TensorDict):
            return Report(outcome, *told), None, None, None
        table = table_of([episode], [outcome], [self._tokenizer], config.stored_share)
        pieces = [packed_alone(outcome, keys) for keys in by_need(outcome.keys())]
        widths = {key: value.shape[1] for key, value in outcome.items() if value.ndim > 1}
        record = TensorDict({key: value[:, :0] if key in widths else value for key, value in outcome.items()}, [])
        num_tokens = int(outcome["attention_mask"].sum())
        return Report(pack(record, record.keys()), *told, widths, num_tokens, longest_row(outcome)), *pieces, table


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
        num_calls = 2 * config.concurrency + 8
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

        async def follow(worker: _Worker) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await worker.actor.follow.remote(self._view)
            except (RayError, TimeoutError) as error:
                self._replace(worker, error)

        with heartbeat.waiting("rollout workers to follow", on="rollout"):
            await asyncio.gather(*(follow(worker) for worker in self._ready()))
        self._check()

    async def run(self, episode: Episode) -> Outcome:
        """Run an episode on the worker with the fewest episodes."""
        self._check()
        while not (ready := self._ready()):  # starting workers have a deadline
            await self._changed.wait()
            self._check()
        worker = min(ready, key=lambda worker: len(worker.episodes))
        prompt_id, row = episode.prompt_id, episode.prompt.row
        run = worker.actor.run.options(num_returns=4)
        reply, *places, table = run.remote(prompt_id, row, episode.attempt, episode.head_version)
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
        episode.servers = report.servers
        if not isinstance(report.outcome, dict):
            return report.outcome
        episode.table, outcome = table, unpack(report.outcome)
        record = Record(dict(outcome.items()), outcome.batch_size)
        record.widths, record.num_tokens, record.longest = dict(report.widths), report.num_tokens, report.longest
        record.places = places
        return record

    def write(self, path: Path, tables: list[Any], trained_step: int | None) -> None:
        """Have a worker write the file of a batch; without workers, write it here (in the store's thread)."""
        for worker in sorted(self._ready(), key=lambda worker: len(worker.episodes)):
            try:
                ray.get(worker.actor.write.remote(path, trained_step, *tables))
            except RayTaskError as error:
                raise error.cause from error
            except RayError:  # another one, or a lost table, which `rows_at` names
                continue
            return
        write_batch(path, rows_at(tables), trained_step)

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
                    f"rollout workers must not be lost: got {what}, after {self._spec.max_restarts} restarts since the "
                    "last checkpoint (workers.restarts). Look at its log."
                )
            )
            return
        logger.warning("%s; its episodes are issued again", what)
        self._note_incident(f"rollout worker {what}; a new worker replaces it, and its episodes are issued again")
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

"""A group of workers: Ray actors that form one torch.distributed world and do one call after the other.

A thread of the master runs the group's calls in the order in which they were submitted. A call starts when every piece
of its inputs exists, never earlier: Ray does not run a rank whose argument failed, and the others would wait in a
collective for ever. Invariant: a call is done by all ranks or by none.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from arealite.api.errors import GroupLostError
from arealite.core.batch import Column, RemoteBatch
from arealite.core.drawing import CallState
from arealite.core.records import CallRecord
from arealite.core.worker import Outcome, RankCall, Run, Worker
from arealite.utils import heartbeat

logger = logging.getLogger("arealite.core")

_PLACE_S = 600.0  # for Ray to find room for a group, and for its processes to start
_LAST_WORD_S = 30.0  # in which the other ranks of a call tell their errors once one has told its own


@dataclass(frozen=True)
class Call:
    """What a group is told to do."""

    name: str
    role: str
    run: Run
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Column] | None = None  # its columns by name; None is a call without a batch
    num_parts: int = 0
    output: str | None = None  # name of the tensor that it returns
    after: tuple[Future[Any], ...] = ()  # what must have ended before it starts
    watch: Callable[[str, CallState], None] = lambda name, state: None  # is told when it begins and ends


@dataclass(frozen=True)
class Reply:
    """What comes of a call: the values of all ranks, and a reference to the piece of each part that it made."""

    values: Future[list[Outcome]] = field(default_factory=Future)
    pieces: Future[list[Any]] = field(default_factory=Future)


@dataclass(frozen=True)
class GroupSpec:
    """What a group is made of."""

    name: str
    num_ranks: int
    strategy: str
    cpus: float  # of each worker, as Ray counts them
    gpus: float
    memory: int  # bytes
    num_threads: int
    env: Mapping[str, str]
    log_folder: str | None
    call_timeout_s: float


class WorkerGroup:
    """The workers of one or several roles. Its methods are the master's."""

    def __init__(self, spec: GroupSpec, record: Callable[[CallRecord], None]) -> None:
        self.spec = spec
        self._record = record
        self.step = 0  # of the run, for records
        self.machines: list[str] = []  # of the ranks
        self._calls: queue.SimpleQueue[tuple[Call, Reply] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._actors: list[Any] = []
        self._placement: Any = None
        self._start()
        self._thread = threading.Thread(target=self._run_calls, name=f"arealite-group-{spec.name}", daemon=True)
        self._thread.start()

    # Life

    def _start(self) -> None:
        """Place the workers and let them form their world."""
        spec = self.spec
        needs = {"CPU": spec.cpus, "GPU": spec.gpus, "memory": float(spec.memory)}
        bundle = {name: amount for name, amount in needs.items() if amount} or {"CPU": 0.001}
        self._placement = placement_group([bundle] * spec.num_ranks, strategy=spec.strategy)
        with heartbeat.waiting(f"Ray to place {spec.num_ranks} workers of group {spec.name}", on="ranks"):
            if not self._placement.wait(_PLACE_S):
                raise GroupLostError(
                    f"Ray must place {spec.num_ranks} workers of group {spec.name} with {bundle} each "
                    f"({spec.strategy}) within {_PLACE_S:g} s: got {ray.available_resources()} free. "
                    f"Add nodes, or lower workers.{spec.name}.ranks."
                )
        self._actors = [self._actor(rank, bundle) for rank in range(spec.num_ranks)]
        own = ray.util.get_node_ip_address()
        addresses = self._get([actor.address.remote(own) for actor in self._actors], "to start")
        self.machines = [name for name, _, _ in addresses]
        hosts, (_, master, port) = [host for _, host, _ in addresses], addresses[0]
        environments = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(spec.num_ranks),
                "LOCAL_RANK": "0",  # Ray shows each worker its own device
                "LOCAL_WORLD_SIZE": str(hosts.count(host)),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(port),
            }
            for rank, host in enumerate(hosts)
        ]
        self._get([actor.meet.remote(one) for actor, one in zip(self._actors, environments)], "to meet")

    def _actor(self, rank: int, bundle: Mapping[str, float]) -> Any:
        spec, name = self.spec, f"{self.spec.name}-{rank}"
        log = None if spec.log_folder is None else os.path.join(spec.log_folder, f"{name}.log")
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "memory": bundle.get("memory")}
        return (
            ray.remote(Worker)
            .options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, rank),
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": dict(spec.env) | {"OMP_NUM_THREADS": str(spec.num_threads)}},
            )
            .remote(name, log, spec.num_threads)
        )

    def close(self) -> None:
        """End the workers; calls that wait fail."""
        self._error = self._error or GroupLostError(f"group {self.spec.name} is closed")
        self._calls.put(None)
        for actor in self._actors:
            ray.kill(actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
        self._thread.join(_LAST_WORD_S)

    # Calls

    def add(self, role: str, make: Callable[[], Any]) -> None:
        """Make the engine of a role on every rank."""
        for outcome in self._get([actor.add.remote(role, make) for actor in self._actors], f"to make engine {role}"):
            if outcome.error is not None:
                raise outcome.error

    def submit(self, call: Call) -> Reply:
        """Let every rank do a call, once it is its turn and its inputs are there; return at once."""
        reply = Reply()
        self._calls.put((call, reply))
        return reply

    def _run_calls(self) -> None:
        while (item := self._calls.get()) is not None:
            call, reply = item
            try:
                if self._error is not None:
                    raise self._error
                outcomes, pieces = self._do(call)
            except BaseException as error:
                for future in (reply.values, reply.pieces):
                    future.set_exception(error)
            else:
                reply.pieces.set_result(pieces)
                reply.values.set_result(outcomes)

    def _do(self, call: Call) -> tuple[list[Outcome], list[Any]]:
        """Run a call on every rank, and return the outcomes and a reference for each part."""
        for future in call.after:
            future.result()
        layout, references = _inputs(call)
        begin = time.time()
        call.watch(call.name, CallState("running", begin))
        owners = [part * self.spec.num_ranks // max(call.num_parts, 1) for part in range(call.num_parts)]
        first: list[Any] = []
        made: list[Any] = []
        for rank, actor in enumerate(self._actors):
            own = [part for part, owner in enumerate(owners) if owner == rank]
            rank_call = RankCall(
                role=call.role,
                run=call.run,
                args=call.args,
                kwargs=call.kwargs,
                pieces=tuple(layout for _ in own),
                has_batch=call.batch is not None,
                output=call.output,
            )
            pieces = itertools.chain.from_iterable(references[part] for part in own)
            answer = actor.call.options(num_returns=1 + len(own)).remote(rank_call, *pieces)
            answers = [answer] if not own else answer
            first.append(answers[0])
            made += answers[1:]
        outcomes = self._outcomes(call, first)
        self._record(
            CallRecord(
                step=self.step,
                call=call.name,
                role=call.role,
                group=self.spec.name,
                begin=begin,
                end=time.time(),
                moved_mib=sum(one.num_bytes for one in outcomes) / 2**20,
                attempt=1,
                machines=tuple(dict.fromkeys(self.machines)),
            )
        )
        call.watch(call.name, CallState("done", begin, time.time()))
        return outcomes, made

    def _outcomes(self, call: Call, references: Sequence[Any]) -> list[Outcome]:
        """Wait for the outcomes of all ranks; a rank that fails alone leaves the others in a collective."""
        deadline = time.monotonic() + self.spec.call_timeout_s
        left, failure = list(references), None
        outcomes: dict[Any, Outcome] = {}
        while left:
            done, left = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                if failure is not None:
                    break
                raise self._lost(f"{call.name} did not end within {self.spec.call_timeout_s:g} s")
            for one in done:
                try:
                    outcomes[one] = ray.get(one)
                except RayError as error:
                    raise self._lost(f"a worker ended during {call.name}: {_last_line(error)}") from error
                if outcomes[one].error is not None and failure is None:
                    failure = outcomes[one]
                    deadline = min(deadline, time.monotonic() + _LAST_WORD_S)
        if failure is not None:
            raise self._failed(call, failure, is_whole=not left)
        return [outcomes[one] for one in references]

    def _failed(self, call: Call, failure: Outcome, *, is_whole: bool) -> BaseException:
        """Return the error of a call; one that not every rank has raised leaves the group useless."""
        assert failure.error is not None
        failure.error.add_note(f"in {call.name} on a worker of group {self.spec.name}:\n{failure.trace}")
        if is_whole and (failure.is_agreed or self.spec.num_ranks == 1):
            vars(failure.error)["is_agreed"] = True
            return failure.error
        lost = self._lost(f"a rank failed alone in {call.name}")
        lost.__cause__ = failure.error
        return lost

    def _lost(self, why: str) -> GroupLostError:
        """Return the error of a group that can't go on."""
        self._error = GroupLostError(f"every worker of group {self.spec.name} must live: {why}. Look at its log.")
        return self._error

    def _get(self, references: Sequence[Any], what: str) -> list[Any]:
        with heartbeat.waiting(f"the workers of group {self.spec.name} {what}", on="ranks"):
            try:
                return list(ray.get(list(references), timeout=_PLACE_S))
            except RayError as error:
                raise self._lost(f"{what}: {_last_line(error)}") from error


def _inputs(call: Call) -> tuple[tuple[Mapping[str, str], ...], list[list[Any]]]:
    """Wait for the inputs of a call; return the keys of the pieces of a part, and the references of each part."""
    sources: dict[int, tuple[Column, dict[str, str]]] = {}
    present = {name: column for name, column in (call.batch or {}).items() if column.exists()}
    for name, column in present.items():
        sources.setdefault(id(column.pieces), (column, {}))[1][name] = column.key
    pieces = [column.pieces.result() for column, _ in sources.values()]
    return tuple(names for _, names in sources.values()), [list(part) for part in zip(*pieces)]


def _last_line(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2].strip()


def columns_of(batch: RemoteBatch, names: Sequence[str] | None = None) -> dict[str, Column]:
    """Return columns of a batch by name: all, or those of `names` that it has."""
    return {name: batch[name] for name in (batch.keys() if names is None else names) if name in batch}

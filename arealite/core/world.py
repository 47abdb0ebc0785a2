"""The processes of a group: Ray actors in a placement group, each a rank of a torch.distributed world.

A world is never repaired: once a rank has died, failed alone or timed out, the state of the others is useless, as they
block in a collective or have half of an update. Methods then raise `LossError`, and the group forms a new world in the
same placement group, whose bundles Ray moves when a node dies. The ranks of a block (`Group.sizes`) get the same parts
of a batch and make the same outputs; the last one stores them.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from arealite.api.errors import GroupLostError
from arealite.core.worker import Call, GroupSpec, Outcome, Worker
from arealite.launcher.place.ray import last_line
from arealite.utils import heartbeat
from arealite.utils.distributed import is_agreed, mark_agreed

logger = logging.getLogger("arealite.core")

PLACE_S = 600.0  # timeout for Ray to place a group and to start its processes
_AGREE_S = 30.0  # in which the other ranks of a call must report the same error
_POLL_S = 0.5  # between looks at the remaining ranks once the first has ended
_DEATH_S = 15.0  # in which Ray, on a busy node, notices the death that made another rank fail
_AT_START = ("OMP_NUM_THREADS", "PYTHON", "PYTORCH", "TORCH")  # prefixes of variables read at process start


class LossError(Exception):
    """The cause of a world's loss; `lost_piece` is Ray's name of an input that was on a dead node.

    With `is_of_code`, a second loss with the same text is the same error; a killed process may fail twice by chance.
    """

    def __init__(self, what: str, *, rank: int = 0, is_of_code: bool = False, lost_piece: str | None = None) -> None:
        super().__init__(what)
        self.rank, self.is_of_code, self.lost_piece = rank, is_of_code, lost_piece


def place(spec: GroupSpec) -> Any:
    """Return a placement group with a bundle per worker; GroupLostError if Ray can't place it."""
    placement = placement_group([_bundle(spec)] * spec.num_ranks, strategy=spec.strategy)
    with heartbeat.waiting(f"Ray to place {spec.num_ranks} workers of group {spec.name}", on="ranks"):
        if not placement.wait(PLACE_S):
            remove_placement_group(placement)
            raise GroupLostError(
                f"Ray must place {spec.num_ranks} workers of group {spec.name} with {_bundle(spec)} each "
                f"({spec.strategy}) within {PLACE_S:g} s: got {ray.available_resources()} free. "
                f"Add nodes, or lower workers.{spec.name}.ranks."
            )
    return placement


def _bundle(spec: GroupSpec) -> dict[str, float]:
    needs = {"CPU": spec.cpus, "GPU": float(spec.gpus_per_rank), "memory": float(spec.memory)}
    return {name: amount for name, amount in needs.items() if amount} or {"CPU": 0.001}


def actor_of(kind: type, env: Mapping[str, str], **options: Any) -> Any:
    """Return an actor class that Ray never restarts, and that starts with few environment variables.

    Actors set the others themselves: Ray logs the variables of a process start, and logs must not contain secrets.
    """
    at_start = {"env_vars": {name: value for name, value in env.items() if name.startswith(_AT_START)}}
    return ray.remote(kind).options(max_restarts=0, max_task_retries=0, runtime_env=at_start, **options)


class World:
    """The actors of a group between two losses. Its methods raise LossError once it is lost."""

    def __init__(self, spec: GroupSpec, placement: Any) -> None:
        self.spec = spec
        self.machines: tuple[str, ...] = ()  # nodes of the ranks, without duplicates
        self._actors = [self._spawn(rank, placement) for rank in range(spec.num_ranks)]

    def _spawn(self, rank: int, placement: Any) -> Any:
        spec, bundle = self.spec, _bundle(self.spec)
        actor = actor_of(
            Worker,
            spec.env,
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank),
        )
        return actor.remote(spec, rank)

    def meet(self) -> None:
        """Form the torch.distributed world."""
        spec, own = self.spec, ray.util.get_node_ip_address()
        addresses = self._get([actor.address.remote(own) for actor in self._actors], "starting")
        self.machines = tuple(dict.fromkeys(name for name, _, _ in addresses))
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
        self._get([actor.meet.remote(one) for actor, one in zip(self._actors, environments)], "meeting")

    def snapshot(self) -> list[Any]:
        """Return references to what each rank needs to continue from here; it is taken after all calls so far."""
        return [actor.snapshot.remote() for actor in self._actors]

    def restore(self, snapshots: Sequence[Any]) -> None:
        """Restore a snapshot on each rank."""
        restoring = [actor.restore.remote(own) for actor, own in zip(self._actors, snapshots, strict=True)]
        self._get(restoring, "restoring a snapshot")

    def kill(self) -> None:
        """Kill the workers."""
        for actor in self._actors:
            ray.kill(actor)

    def run(
        self, call: Call, layout: Sequence[Mapping[str, str]], references: Sequence[Sequence[Any]]
    ) -> tuple[list[Outcome], list[Any]]:
        """Run a call on every rank; return the outcomes of all ranks, and a reference to its outputs for each part.

        `layout` has the keys of a part's pieces, `references` the pieces of each part. An error that all ranks raise is
        raised unchanged.
        """
        pickled = cloudpickle.dumps(call.for_ranks(layout))
        num_parts = 0 if call.batch is None else call.batch.num_parts
        sizes = self.spec.sizes
        blocks = [part * sizes.data // num_parts for part in range(num_parts)]
        first: list[Any] = []
        made: list[Any] = []
        for rank, actor in enumerate(self._actors):
            own = [part for part, block in enumerate(blocks) if block == sizes.data_rank(rank)]
            pieces = itertools.chain.from_iterable(references[part] for part in own)
            num_made = len(own) if sizes.is_last(rank) else 0
            replies = actor.call.options(num_returns=1 + num_made).remote(pickled, num_made, *pieces)
            outcome, *outputs = replies if num_made else [replies]
            first.append(outcome)
            made += outputs
        return self._outcomes(call, first), made

    def _outcomes(self, call: Call, references: Sequence[Any]) -> list[Outcome]:
        """Wait for the outcomes of all ranks; if a rank fails alone, the others block in a collective."""
        timeout_s = self.spec.call_timeout_s if call.timeout_s is None else call.timeout_s
        deadline = time.monotonic() + timeout_s
        left, failed = list(references), None
        outcomes: dict[Any, Outcome] = {}
        while left:
            # The other ranks end with the first, or hang: polling each rank would cost as much as the call.
            num_awaited, look_s = (len(left), _POLL_S) if outcomes else (1, timeout_s)
            patience_s = max(0.0, deadline - time.monotonic())
            done, left = ray.wait(left, num_returns=num_awaited, timeout=min(patience_s, look_s))
            if left and not done and time.monotonic() >= deadline:
                if failed is not None:
                    break
                late = [rank for rank, reference in enumerate(references) if reference in left]
                what = f"rank {', '.join(map(str, late))} did not end {call.name} within {timeout_s:g} s"
                raise LossError(what, rank=late[0], is_of_code=True)
            for reference in done:
                rank = references.index(reference)
                outcomes[reference] = self._outcome(call, rank, reference)
                if outcomes[reference].error is not None and failed is None:
                    failed = rank
                    patience_s = _AGREE_S if is_agreed(outcomes[reference].error) else _DEATH_S
                    deadline = min(deadline, time.monotonic() + patience_s)
        if failed is not None:
            kinds = {type(outcome.error) for outcome in outcomes.values()}
            is_of_all = not left and (is_agreed(outcomes[references[failed]].error) or len(kinds) == 1)
            raise self._failure(call, failed, outcomes[references[failed]], is_of_all=is_of_all)
        return [outcomes[reference] for reference in references]

    def _outcome(self, call: Call, rank: int, reference: Any) -> Outcome:
        try:
            packed = ray.get(reference)
        except ObjectLostError as error:
            what = f"an input of {call.name} was on a node that died"
            raise LossError(what, rank=rank, lost_piece=error.object_ref_hex) from error
        except RayError as error:
            raise LossError(f"rank {rank} died in {call.name}: {cause_of_death(error)}", rank=rank) from error
        try:
            outcome: Outcome = pickle.loads(packed)
        except Exception as error:  # the classes of its value may raise anything
            return Outcome(error=error)
        return outcome

    def _failure(self, call: Call, rank: int, outcome: Outcome, *, is_of_all: bool) -> BaseException:
        """Return the error of a call: a loss, unless all ranks have raised it."""
        error = outcome.error
        assert error is not None
        error.add_note(f"in {call.name} on a worker of group {self.spec.name}:\n{outcome.trace}")
        if is_of_all:
            return mark_agreed(error)
        what = f"rank {rank} failed alone in {call.name} with {type(error).__name__}: {error}"
        loss = LossError(what, rank=rank, is_of_code=True)
        loss.__cause__ = error
        return loss

    def _get(self, references: Sequence[Any], doing: str) -> list[Any]:
        """Return the result of every rank."""
        with heartbeat.waiting(f"the workers of group {self.spec.name}, {doing}", on="ranks"):
            try:
                return list(ray.get(list(references), timeout=PLACE_S))
            except GetTimeoutError as error:
                raise LossError(f"{doing} did not end within {PLACE_S:g} s", is_of_code=True) from error
            except RayError as error:
                raise LossError(f"{doing} failed: {last_line(error)}") from error


def cause_of_death(error: BaseException) -> str:
    return last_line(error).removeprefix("The actor is dead because ").partition(" Some common causes")[0]

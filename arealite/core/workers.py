"""The workers of a run: groups on Ray, engine stubs per role, and the transfer of batches."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar, cast

import ray
import torch
from tensordict import TensorDict

from arealite.api.cli_args import BaseExperimentConfig, TrainEngineConfig, WorkersConfig
from arealite.api.config.checks import check_workers
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.batch import Column, Pieces, RemoteBatch, Share, by_need, fetch
from arealite.core.group import WorkerGroup
from arealite.core.page import Incident
from arealite.core.records import CallRecord
from arealite.core.remote_engine import RemoteEngine
from arealite.core.rollouts import RolloutSpec, RolloutWorkers
from arealite.core.worker import GroupSpec
from arealite.engine.fsdp_engine import COLLECTIVE_TIMEOUT_S
from arealite.launcher.place.ray import connect, forwarded_environment, own_ray
from arealite.launcher.plan.layout import Group, make_layout
from arealite.rollout.prompts import ShouldAccept
from arealite.rollout.trajectory import Record, assemble_batch, deal_groups, has_spread
from arealite.utils.distributed import join_default_group, leave_default_group
from arealite.utils.packed import head_of, layout_of, pack
from arealite.utils.tensors import split_rows, trimmed_rows, unit_lengths
from arealite.utils.terminal import listed

E = TypeVar("E")

_NUM_RECORDS = 10_000
_MAX_BATCHES = 16  # between two snapshots: a group keeps the pieces of all calls that it may replay


class Workers:
    """Starts and stops groups of workers. Use it as a context; the process becomes a master with one rank."""

    def __init__(self, config: BaseExperimentConfig, *, is_declared: bool = False) -> None:
        """With `is_declared` the loop runs a declared graph."""
        check_workers(config.workers)
        if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"a script with workers must be one process, the master: got {num_ranks} of torchrun. Use "
                "--nproc-per-node 1, and set workers.<role>.ranks."
            )
        self._config, self._limits = config, config.workers or WorkersConfig()
        if (num := self._limits.rollout.num) and not is_declared:
            raise ConfigError(
                f"workers.rollout.num must be 0 in a script with a loop of its own: got {num}. Remove it, or declare a "
                "graph."
            )
        self._layout = make_layout(config)
        self._groups: dict[str, WorkerGroup] = {}  # by name
        self._step, self._num_batches = 0, 0  # step of the run; batches scattered since the last snapshot
        self._own_ray = ExitStack()
        self.incidents: list[Incident] = []  # groups that lost their workers
        self._records: deque[CallRecord] = deque(maxlen=_NUM_RECORDS)  # finished calls

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGTERM)
        if os.environ.get("RAY_ADDRESS"):
            connect()
        else:
            num_gpus = sum(group.num_gpus for group in self._layout)
            self._own_ray.enter_context(own_ray(RunFolder(self._config), num_gpus))
        self._env = forwarded_environment()  # before the master selects its network interface, loopback
        signal.signal(signal.SIGTERM, handler)  # Ray's handler aborts
        join_default_group(COLLECTIVE_TIMEOUT_S)
        return self

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            group.close()
        leave_default_group()
        ray.shutdown()
        self._own_ray.close()

    @property
    def groups(self) -> list[WorkerGroup]:
        return list(self._groups.values())

    def engine(self, role: str, engine_class: Callable[..., E], config: Any, **options: Any) -> E:
        """Return a stub of an engine of this class, whose methods run on the workers of the role, with their sizes."""
        group = next((group for group in self._layout if role in group.roles), None)
        if group is None:
            known = listed(name for group in self._layout for name in group.roles)
            change = f"Correct its name, or add a block {role} to the config."
            raise ConfigError(f"the role of an engine must be one of the experiment, {known}: got {role}. {change}")
        if group.name not in self._groups:
            self._groups[group.name] = WorkerGroup(self._spec(group), self._records.append, self._note_incident)
        if isinstance(config, TrainEngineConfig):
            config = config.new(parallel=str(group.sizes))
        make = functools.partial(engine_class, config, **options)
        return cast("E", RemoteEngine(self, self._groups[group.name], role, make, config))

    def _spec(self, group: Group) -> GroupSpec:
        launcher, is_cluster = self._config.launcher, bool(os.environ.get("RAY_ADDRESS"))
        num_threads = group.threads or torch.get_num_threads()
        return GroupSpec(
            **vars(group),
            cpus=launcher.trainer_cpus_per_gpu if is_cluster else 0,
            memory=launcher.trainer_mem_per_gpu << 20,
            num_threads=num_threads,
            env=self._env | {"OMP_NUM_THREADS": str(num_threads), "OMP_PROC_BIND": "false"},  # groups share cores
            log_folder=RunFolder(self._config).logs,
            call_timeout_s=self._limits.call_timeout,
            max_restarts=self._limits.restarts,
        )

    def rollouts(
        self, make_workflow: Callable[[], RolloutWorkflow], should_accept: ShouldAccept | None
    ) -> RolloutWorkers | None:
        """Start `workers.rollout.num` processes that run episodes of this workflow; None if the number is 0."""
        if self._limits.rollout.num == 0:
            return None
        assert self._config.rollout is not None, "episodes have a block"
        path = os.pathsep.join(filter(None, sys.path))  # includes the files of rewards
        spec = RolloutSpec(
            num=self._limits.rollout.num,
            config=self._config.rollout,
            make_workflow=make_workflow,
            should_accept=should_accept,
            env=self._env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            log_folder=RunFolder(self._config).logs,
            max_restarts=self._limits.restarts,
        )
        return RolloutWorkers(spec, self._note_incident)

    def take_records(self) -> list[CallRecord]:
        """Return and clear the records of finished calls."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def note_step(self, step: int) -> None:
        """Begin a step: every group takes a snapshot, from which it replays after a loss."""
        self._step, self._num_batches = step, 0
        for group in self.groups:
            group.begin_step(step)

    def _note_incident(self, text: str) -> None:
        self.incidents.append(Incident(time.time(), text))

    def metrics(self) -> dict[str, float]:
        """Return the numbers of replaced workers and of replayed calls so far."""
        return {
            "core/respawns": float(sum(group.num_respawns for group in self.groups)),
            "core/replayed_calls": float(sum(group.num_replayed for group in self.groups)),
        }

    # Batches

    fetch = staticmethod(fetch)

    @property
    def num_parts(self) -> int:
        """Parts of a batch: the most blocks of a group, started or not; the ranks of a block get the same parts."""
        return max(group.sizes.data for group in self._layout)

    def scatter(self, batch: TensorDict | Sequence[TensorDict]) -> RemoteBatch:
        """Put a batch, or that of some trajectories, into the object store, split into a part for each block of
        the group with the most. Rows of records, which are there already, stay where they are.

        Every part has two pieces: token inputs, and the rest, which few calls need. After many batches in a step the
        groups take another snapshot, because the pieces of replayable calls would fill the store.
        """
        if self._num_batches == _MAX_BATCHES:
            self.note_step(self._step)
        self._num_batches += 1
        if not isinstance(batch, TensorDict):
            if records := [one for one in batch if isinstance(one, Record)]:
                return self._deal(records)
            batch = assemble_batch(batch)
        if "group_index" in batch:
            groups_B = batch["group_index"]
            rewards_B = batch.get("rewards", torch.zeros(len(batch)))
            lengths = groups_B.bincount(batch["attention_mask"].sum(1)).tolist()
            one_G = rewards_B.new_zeros(len(lengths)).index_put_((groups_B,), rewards_B)  # reward of one row per group
            have_spread = groups_B.bincount(rewards_B != one_G[groups_B]).tolist()
            shares = self._shares(lengths, [num > 0 for num in have_spread])
            order = [torch.isin(groups_B, torch.tensor(share)).nonzero()[:, 0].tolist() for share in shares]
        else:
            order = split_rows(unit_lengths(batch["attention_mask"]), self.num_parts)
        parts = [trimmed_rows(batch, rows) for rows in order]
        widest = max(range(len(parts)), key=lambda part: parts[part]["attention_mask"].shape[1])
        parts[widest] = batch[order[widest]] if len(order) > 1 else batch  # fetched tensors are as wide as the batch
        remote = RemoteBatch(order)
        for keys in by_need(batch.keys()):
            pieces = Pieces([ray.put(pack(part, keys)) for part in parts])
            for key in keys:
                remote[key] = Column(pieces, key)
        return remote

    def _shares(self, lengths: Sequence[int], have_spread: Sequence[bool]) -> list[list[int]]:
        """Assign groups of these numbers of tokens to parts."""
        rollout = self._config.rollout
        return deal_groups(lengths, have_spread, self.num_parts, 1 if rollout is None else rollout.num_minibatches)

    def _deal(self, records: Sequence[Record]) -> RemoteBatch:
        """Return the batch of records, whose parts name the places of their rows."""
        shares = self._shares([one.num_tokens for one in records], list(map(has_spread, records)))
        batch, layout = assemble_batch(records), layout_of([one.without_rows() for one in records])
        heads = [head_of(layout, [records[group].longest for group in share]) for share in shares]
        rows = [torch.isin(batch["group_index"], torch.tensor(share)).nonzero()[:, 0] for share in shares]
        remote = RemoteBatch([one.tolist() for one in rows])
        for place, keys in enumerate(by_need(layout.keys())):
            mine = {*keys, "attention_mask"}
            parts = [
                Share({key: head[key] for key in mine}, [records[group].places[place] for group in share])
                for head, share in zip(heads, shares)
            ]
            pieces = Pieces([ray.put(part) for part in parts])
            remote.update({key: Column(pieces, key) for key in keys})
        numbers = Pieces([ray.put(pack(batch[one], ["group_index"])) for one in rows])
        remote["group_index"] = Column(numbers, "group_index")
        return remote

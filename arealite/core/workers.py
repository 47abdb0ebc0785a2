"""The workers of a run: groups on Ray, the engines of their roles, and the way of batches there and back."""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import ray
import torch
from tensordict import TensorDict

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.core.batch import Column, RemoteBatch, join, pack, unpack
from arealite.core.group import GroupSpec, WorkerGroup
from arealite.core.records import CallRecord
from arealite.core.remote_engine import RemoteEngine
from arealite.engine.fsdp_engine import COLLECTIVE_TIMEOUT_S
from arealite.engine.ppo.actor import TOKENS
from arealite.launcher.place.ray import connect, forwarded_environment
from arealite.rollout.trajectory import split_batch
from arealite.utils.distributed import join_default_group, leave_default_group
from arealite.utils.tensors import split_rows

E = TypeVar("E")

_ROW = "row_of_the_whole_batch"
_NUM_RECORDS = 10_000


class Workers:
    """Starts and ends groups of workers. Use it as a context; the process becomes a master with one rank."""

    def __init__(self, config: BaseExperimentConfig) -> None:
        if config.workers is None:
            raise ConfigError("workers must be given to a script of a master: got nothing. Add `workers: {}`.")
        self._config, self._roles = config, config.workers
        mode = config.allocation
        self._default_ranks = 1 if mode is None else max(1, mode.train_world_size)
        self._groups: dict[str, WorkerGroup] = {}  # by role, several of which may have the same
        self.records: deque[CallRecord] = deque(maxlen=_NUM_RECORDS)  # of calls that have ended

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGTERM)
        if os.environ.get("RAY_ADDRESS"):
            connect()
        else:
            ray.init(
                num_cpus=max(64, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        signal.signal(signal.SIGTERM, handler)  # Ray's own aborts
        join_default_group(COLLECTIVE_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for group in self.groups:
            group.close()
        leave_default_group()
        ray.shutdown()

    @property
    def groups(self) -> list[WorkerGroup]:
        return list(dict.fromkeys(self._groups.values()))

    def engine(self, role: str, engine_class: Callable[..., E], config: Any, **options: Any) -> E:
        """Return what stands for an engine of this class, whose methods the workers of the role run."""
        if not hasattr(self._roles, role):
            known = ", ".join(name for name, value in vars(self._roles).items() if hasattr(value, "share"))
            raise ConfigError(f"the role of an engine must be one of {known}: got {role}. Correct its name.")
        make = functools.partial(engine_class, config, **options)
        return cast("E", RemoteEngine(self, self._group_of(role), role, make, config))

    def _group_of(self, role: str) -> WorkerGroup:
        wish = getattr(self._roles, role)
        other = wish.share or (next(iter(self._groups), None) if wish.ranks is None else None)
        if other is not None and other not in self._groups:
            raise ConfigError(
                f"workers.{role}.share must name a role that has workers before it: got {other}, and "
                f"{', '.join(self._groups) or 'none'} have. Make that engine first."
            )
        self._groups[role] = self._groups[other] if other is not None else self._start(role, wish)
        return self._groups[role]

    def _start(self, role: str, wish: Any) -> WorkerGroup:
        launcher, has_gpus = self._config.launcher, self._config.cluster.n_gpus_per_node > 0
        is_cluster = bool(os.environ.get("RAY_ADDRESS"))
        spec = GroupSpec(
            name=role,
            num_ranks=wish.ranks or self._default_ranks,
            strategy=wish.strategy,
            cpus=launcher.trainer_cpus_per_gpu if is_cluster else 0,
            gpus=float(has_gpus),
            memory=launcher.trainer_mem_per_gpu << 20,
            num_threads=wish.threads or torch.get_num_threads(),
            env=forwarded_environment(),
            log_folder=str(RunFolder(self._config).logs),
            call_timeout_s=self._roles.call_timeout,
        )
        return WorkerGroup(spec, self.records.append)

    def note_step(self, step: int) -> None:
        """Let records of calls bear this step from now on."""
        for group in self.groups:
            group.step = step

    # Batches

    @property
    def num_parts(self) -> int:
        return max((group.spec.num_ranks for group in self.groups), default=1)

    def scatter(self, batch: TensorDict) -> RemoteBatch:
        """Put a batch into the object store, cut into a part for each rank of the largest group.

        Every part is two pieces: what tokens are, and the rest, which few calls need.
        """
        if "group_index" in batch:
            numbered = batch.clone(recurse=False).set(_ROW, torch.arange(len(batch)))
            order = [part[_ROW].tolist() for part in split_batch(numbered, self.num_parts)]
        else:
            order = split_rows(batch["attention_mask"], self.num_parts)
        parts = [batch[rows] for rows in order]
        remote = RemoteBatch(order, [int(part["attention_mask"].sum()) for part in parts])
        tokens = [key for key in TOKENS if key in batch]
        for keys in (tokens, [key for key in sorted(batch.keys()) if key not in tokens]):
            pieces: Future[list[Any]] = Future()
            pieces.set_result([ray.put(pack(part, keys)) for part in parts])
            for key in keys:
                remote[key] = Column(pieces, key)
        return remote

    def fetch(self, column: Column, batch: RemoteBatch) -> torch.Tensor:
        """Return a column as a tensor of the whole batch, its rows where they were before it was scattered."""
        masks = ray.get(batch["attention_mask"].pieces.result())
        values = ray.get(column.pieces.result())
        names = {"attention_mask": batch["attention_mask"].key, "value": column.key}
        parts = [
            unpack({name: piece[names[name]] for name, piece in {"attention_mask": mask, "value": value}.items()})
            for mask, value in zip(masks, values)
        ]
        rows = torch.tensor([row for part in batch.order for row in part], dtype=torch.long)
        return join(parts)["value"][rows.argsort()]

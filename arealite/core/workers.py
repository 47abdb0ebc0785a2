"""The workers of a run: groups on Ray, the engines of their roles, and the way of batches there and back."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import ray
import torch
from ray.exceptions import ObjectLostError
from tensordict import TensorDict

from arealite.api.cli_args import BaseExperimentConfig, WorkersConfig
from arealite.api.config.checks import check_workers
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.batch import Column, Pieces, RemoteBatch, join, pack, unpack, with_counts
from arealite.core.group import WorkerGroup
from arealite.core.page import Incident
from arealite.core.records import CallRecord
from arealite.core.remote_engine import RemoteEngine
from arealite.core.rollouts.worker import RolloutSpec
from arealite.core.rollouts.workers import RolloutWorkers
from arealite.core.worker import GroupSpec
from arealite.engine.fsdp_engine import COLLECTIVE_TIMEOUT_S
from arealite.engine.ppo.actor import TOKENS
from arealite.launcher.place.ray import connect, forwarded_environment
from arealite.launcher.plan.layout import Group, make_layout
from arealite.rollout.prompts import ShouldAccept
from arealite.rollout.trajectory import split_batch
from arealite.utils.devices import visible_gpus
from arealite.utils.distributed import join_default_group, leave_default_group
from arealite.utils.files import file_lock
from arealite.utils.secret import ensure_secret
from arealite.utils.sentences import listed
from arealite.utils.tensors import split_rows, trimmed_rows, unit_lengths

E = TypeVar("E")

_ROW = "row_of_the_whole_batch"
_NUM_RECORDS = 10_000
_MAX_BATCHES = 16  # between two snapshots, as a group keeps the pieces of all calls that it may have to do again
_YOUNG_S = 60.0  # a folder of this age may not be locked yet


class Workers:
    """Starts and ends groups of workers. Use it as a context; the process becomes a master with one rank."""

    def __init__(self, config: BaseExperimentConfig, *, is_declared: bool = False) -> None:
        """`is_declared` tells whether the loop is that of a declared graph."""
        check_workers(config.workers)
        if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"a script with workers must be one process, the master: got {num_ranks} of torchrun. Use "
                "--nproc-per-node 1, and set workers.<role>.ranks."
            )
        self._config, self._limits = config, config.workers or WorkersConfig()
        for key, number in {"ahead": self._limits.ahead, "rollout.num": self._limits.rollout.num}.items():
            if number and not is_declared:
                where = "in a script with a loop of its own"
                raise ConfigError(f"workers.{key} must be 0 {where}: got {number}. Remove it, or declare a graph.")
        self._layout = make_layout(config)
        self._groups: dict[str, WorkerGroup] = {}  # by name
        self._step, self._num_batches = 0, 0  # of the run; scattered since the last snapshot
        self._folder = ExitStack()  # of a Ray of our own
        self.incidents: list[Incident] = []  # groups that lost their workers
        self._records: deque[CallRecord] = deque(maxlen=_NUM_RECORDS)  # of calls that have ended

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGTERM)
        if os.environ.get("RAY_ADDRESS"):
            connect()
        else:
            self._give_token()
            folder = self._folder.enter_context(_ray_folder())
            _start_ray(sum(group.num_gpus for group in self._layout), folder)
        self._env = forwarded_environment()  # before the master chooses its own network interface, which is loopback
        signal.signal(signal.SIGTERM, handler)  # Ray's own aborts
        join_default_group(COLLECTIVE_TIMEOUT_S)
        return self

    def _give_token(self) -> None:
        """Let Ray admit who shows the run's secret, as it listens on all interfaces and runs what it is sent."""
        folder = RunFolder(self._config)
        folder.path.mkdir(parents=True, exist_ok=True)
        ensure_secret(folder.path)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(folder.secret)
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # of another run in this process

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            group.close()
        leave_default_group()
        ray.shutdown()
        self._folder.close()

    @property
    def groups(self) -> list[WorkerGroup]:
        return list(self._groups.values())

    def engine(self, role: str, engine_class: Callable[..., E], config: Any, **options: Any) -> E:
        """Return what stands for an engine of this class, whose methods the workers of the role run."""
        group = next((one for one in self._layout if role in one.roles), None)
        if group is None:
            known = listed(name for one in self._layout for name in one.roles)
            change = f"Correct its name, or add a block {role} to the config."
            raise ConfigError(f"the role of an engine must be one of the experiment, {known}: got {role}. {change}")
        if group.name not in self._groups:
            self._groups[group.name] = WorkerGroup(self._spec(group), self._records.append, self._note_incident)
        make = functools.partial(engine_class, config, **options)
        return cast("E", RemoteEngine(self, self._groups[group.name], role, make, config))

    def _spec(self, group: Group) -> GroupSpec:
        launcher, is_cluster = self._config.launcher, bool(os.environ.get("RAY_ADDRESS"))
        num_threads = group.threads or torch.get_num_threads()
        return GroupSpec(
            name=group.name,
            num_ranks=group.num_ranks,
            strategy=group.strategy,
            cpus=launcher.trainer_cpus_per_gpu if is_cluster else 0,
            gpus=float(group.gpus_per_rank),
            memory=launcher.trainer_mem_per_gpu << 20,
            num_threads=num_threads,
            env=self._env | {"OMP_NUM_THREADS": str(num_threads)},
            log_folder=RunFolder(self._config).logs,
            call_timeout_s=self._limits.call_timeout,
            max_restarts=self._limits.restarts,
        )

    def rollouts(
        self, make_workflow: Callable[[], RolloutWorkflow], should_accept: ShouldAccept | None
    ) -> RolloutWorkers | None:
        """Return what runs episodes with this workflow on `workers.rollout.num` processes; None if that is 0."""
        if self._limits.rollout.num == 0:
            return None
        assert self._config.rollout is not None, "episodes have a block"
        path = os.pathsep.join(filter(None, sys.path))  # with rewards' files
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

    def machines(self) -> dict[Group, tuple[str, ...]]:
        """Return the nodes of each group that runs."""
        return {one: self._groups[one.name].machines for one in self._layout if one.name in self._groups}

    def take_records(self) -> list[CallRecord]:
        """Return the records of calls that have ended since the last time."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def note_step(self, step: int) -> None:
        """Begin a step, to whose start a group goes back if it loses its workers."""
        self._step, self._num_batches = step, 0
        for group in self.groups:
            group.begin_step(step)

    def _note_incident(self, text: str) -> None:
        self.incidents.append(Incident(time.time(), text))

    def metrics(self) -> dict[str, float]:
        """Return how many workers have replaced lost ones so far, and how many calls were done again."""
        return {
            "core/respawns": float(sum(group.num_respawns for group in self.groups)),
            "core/replayed_calls": float(sum(group.num_replayed for group in self.groups)),
        }

    # Batches

    @property
    def num_parts(self) -> int:
        """Parts of a batch: the ranks of the largest group, also of one that no engine has started so far."""
        return max(group.num_ranks for group in self._layout)

    def scatter(self, batch: TensorDict) -> RemoteBatch:
        """Put a batch into the object store, cut into a part for each rank of the largest group.

        Every part is two pieces: what tokens are, and the rest, which few calls need. After many batches of a step the
        groups take a snapshot, to which they then go back, as what was done before it would fill the store.
        """
        if self._num_batches == _MAX_BATCHES:
            self.note_step(self._step)
        self._num_batches += 1
        if "group_index" in batch:
            numbered = batch.clone(recurse=False).set(_ROW, torch.arange(len(batch)))
            rollout = self._config.rollout
            num_minibatches = 1 if rollout is None else rollout.num_minibatches
            order = [part[_ROW].tolist() for part in split_batch(numbered, self.num_parts, num_minibatches)]
        else:
            order = split_rows(unit_lengths(batch["attention_mask"]), self.num_parts)
        parts = [trimmed_rows(batch, rows) for rows in order] if len(order) > 1 else [batch]
        remote = RemoteBatch(order)
        tokens = [key for key in TOKENS if key in batch]
        for keys in (tokens, [key for key in sorted(batch.keys()) if key not in tokens]):
            pieces = Pieces([ray.put(pack(part, keys)) for part in parts])
            for key in keys:
                remote[key] = Column(pieces, key)
        return remote

    def fetch(self, column: Column, batch: RemoteBatch) -> torch.Tensor:
        """Return a column as a tensor of the whole batch, its rows where they were before it was scattered."""
        key = column.key
        columns = {name: batch[name] for name in with_counts(["attention_mask", key]) if name != key} | {key: column}
        pieces = {name: _fetched(one.pieces) for name, one in columns.items()}
        parts = [
            unpack({name: piece[columns[name].key] for name, piece in zip(pieces, part)})
            for part in zip(*pieces.values())
        ]
        rows = torch.tensor([row for part in batch.order for row in part], dtype=torch.long)
        return join(parts)[key][rows.argsort()]


@contextmanager
def _ray_folder() -> Iterator[str]:
    """Make a folder for Ray's logs and sockets, whose paths must be short; remove it, and those of dead masters."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for left in base.glob("arealite-ray-*"):
        with suppress(OSError):  # of another user, or of a master that lives
            if left.stat().st_uid == os.geteuid() and time.time() - left.stat().st_mtime > _YOUNG_S:
                with file_lock(left / "lock", timeout_s=0.0):
                    shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix="arealite-ray-", dir=base, ignore_cleanup_errors=True) as folder,
        file_lock(Path(folder, "lock"), timeout_s=0.0),
    ):
        yield folder


def _start_ray(num_gpus: int, folder: str) -> None:
    """Start Ray on this node, for the workers of this process, which from then on leaves the GPUs to them."""
    gpus = visible_gpus() if num_gpus else []
    if len(gpus) < num_gpus:
        raise ConfigError(
            f"this node must have a GPU for each worker: got {len(gpus)} and {num_gpus} workers. Lower "
            "workers.<role>.ranks, or set cluster.n_gpus_per_node=0 to run on the CPU."
        )
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:num_gpus])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # no worker of ours is one without variables
    ray.init(
        address="local",  # and not one that somebody else runs on this node
        num_cpus=max(64, os.cpu_count() or 1),
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
    )
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if (mode := os.environ.get("RAY_AUTH_MODE")) != "token":  # Ray sets it if nobody does
        ray.shutdown()
        raise ConfigError(
            "Ray must ask for a token, as whoever connects to it can run code here: got "
            f"RAY_AUTH_MODE={mode or ''} and Ray {ray.__version__}. Set RAY_AUTH_MODE=token, with Ray 2.52 or later."
        )


def _fetched(pieces: Pieces) -> list[Any]:
    """Return the pieces themselves; those that were on a node that died are made again."""
    while True:
        references = pieces.result()
        try:
            return list(ray.get(references))
        except ObjectLostError as error:
            pieces.report_lost(error.object_ref_hex)

"""The master's stub of an engine: its methods run on the workers of a group.

A method that returns a tensor returns a pending `Column` at once, so that calls of several groups overlap; a method
that changes the batch or returns numbers waits for the workers. A batch of the master is scattered first, and its
results are fetched as tensors.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.api.errors import CheckpointError, GroupLostError
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from arealite.core.batch import Column, RemoteBatch, fetch
from arealite.core.group import Task, WorkerGroup
from arealite.core.worker import Call, Outcome, Redo, RoleName, Run
from arealite.engine.checkpointing import WRITE_TIMEOUT_S
from arealite.rollout.account.store import KEYS, Update, update_of
from arealite.utils import heartbeat
from arealite.utils.background import start_thread
from arealite.utils.distributed import meeting_address
from arealite.utils.files import FileEntry
from arealite.utils.network import hold_port, port_of
from arealite.utils.tensors import TOKENS

if TYPE_CHECKING:
    from arealite.core.workers import Workers

_POLL_S = 0.5
_UPLOAD_TIMEOUTS = 2  # timeouts of an update within which workers must send: one to meet the servers, one to send


def _begin_to_write(engine: Any, folder: str) -> None:
    """Start to write the state in a thread of this rank."""
    engine.written = start_thread(engine.write_state, folder)


def _written(engine: Any) -> Any:
    """Return the files or the error of a finished write, None while it runs."""
    if not hasattr(engine, "written"):
        return GroupLostError(
            "a checkpoint must keep its workers: they were replaced. The next checkpoint will be complete."
        )
    return (engine.written.exception() or engine.written.result()) if engine.written.done() else None


def _meeting_point(engine: Any, toward: str) -> tuple[str, int, bool]:
    """Hold a port at the address of this node that `toward` can reach, until the next call."""
    address = meeting_address(toward)
    engine.held_port = hold_port()  # this closes the previous port
    return address, port_of(engine.held_port), torch.cuda.is_available()


def _upload(engine: Any, meta: WeightUpdateMeta) -> dict[str, str]:
    """Send the weights and return the fingerprints that rank 0 computed."""
    engine.upload_weights(meta)
    return meta.transfer.fingerprints


class RemoteEngine:
    """Runs the methods of a role's engine on its group. `call` runs any method that has no stub here."""

    def __init__(self, workers: Workers, group: WorkerGroup, role: str, make: Callable[[], Any], config: Any) -> None:
        self.config = config
        self.role, self.group = role, group
        self._workers = workers
        self._version = 0
        self._life: int | None = None  # `num_respawns` of the group when it returned its broadcast group
        self.wait(group.add(role, make))

    # Life

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None, *, policy: RemoteEngine | None = None) -> None:
        """Load the model on every worker; a reference that shares its policy's weights must be in the same group."""
        kwargs = {"policy": RoleName(policy.role)} if policy is not None and policy.group is self.group else {}
        self._value("initialize", addr, ft_spec, redo="always", **kwargs)
        self.model_config = self._value("model_config")

    def destroy(self) -> None:
        """Free the model on every worker; after an error do nothing, as workers stop and a call could hang."""
        if sys.exc_info()[0] is not None:
            return
        with contextlib.suppress(GroupLostError):  # its memory is free already
            self._value("destroy", redo="never")

    @property
    def parallelism_group(self) -> dist.ProcessGroup | None:
        """The master's own group of one rank: workers return reduced statistics."""
        return dist.group.WORLD

    @property
    def num_threads(self) -> int:
        return self.group.spec.num_threads

    def set_version(self, version: int) -> None:
        """Set the version of the weights."""
        self._version = version
        self._value("set_version", version, redo="in_step")
        self._workers.note_step(version)

    def get_version(self) -> int:
        """Return the version of the weights."""
        return self._version

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a Hugging Face checkpoint."""
        self._value("load", meta, redo="always" if self.config.optimizer is None else "in_step")

    # Checkpoints, as `CheckpointedEngine` has them

    def write_state(self, folder: str) -> dict[str, FileEntry]:
        """Write the kept state on the workers, in parallel to later calls, and wait (in a thread of the master)."""
        self._value(_begin_to_write, folder)
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while (written := self._value(_written)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the workers of {self.role} must write {folder} within {WRITE_TIMEOUT_S:g} s: they did not. Look "
                    "at their logs, and at the disk."
                )
            time.sleep(_POLL_S)
        if isinstance(written, Exception):
            raise written
        return written

    def note_checkpoint(self) -> None:
        """Reset the count of the group's restarts: the run would resume from this checkpoint."""
        self.group.note_checkpoint()

    def read_state(self, folder: str) -> None:
        """Restore a state that workers, or ranks of a script, wrote."""
        self._value("read_state", folder, redo="in_step")
        self._version = self._value("get_version")

    # Calls on batches

    def call(
        self,
        run: Run,
        batch: RemoteBatch | TensorDict,
        *args: Any,
        output: str = "",
        keys: Sequence[str] = (),
        **kw: Any,
    ) -> Any:
        """Run a method of the engine (by name) or a function `f(engine, batch, **kw)` on a batch.

        Waits for the value of rank 0 and adds new columns of the batch here too. With `output`, the name of a returned
        tensor, it returns a pending column instead. `keys` are the columns that the call sees, by default all.
        """
        home = self._workers.scatter(batch) if isinstance(batch, TensorDict) else batch
        task = self.submit(run, home, keys, args=args, kwargs=kw, output=output or None)
        if output:
            column = Column(task.pieces, output)
            return column if home is batch else fetch(column, home)
        outcome = self.wait(task)
        for key in outcome.made:
            home[key] = Column(task.pieces, key)
            if isinstance(batch, TensorDict):
                batch[key] = fetch(home[key], home)
        return outcome.value

    def submit(self, run: Run, batch: RemoteBatch | None = None, keys: Sequence[str] = (), **more: Any) -> Task:
        """Queue a call on the workers, with or without a batch; return at once.

        Workers get `keys` of the batch (by default all) and `attention_mask`, which unpacking needs. `more` are other
        fields of a Call.
        """
        if batch is not None:
            more["batch"] = batch.select(keys)
        name = run if isinstance(run, str) else run.__name__.strip("_")
        return self.group.submit(Call(f"{self.role}.{name}", self.role, run, **more))

    def wait(self, task: Task) -> Outcome:
        """Wait for a call and return the outcome of rank 0."""
        with heartbeat.waiting(f"{task.call.name} on the workers of group {self.group.spec.name}", on="ranks"):
            outcome = task.values.result()[0]  # the group has deadlines
        heartbeat.tick()
        return outcome

    def updates_of(self, batch: RemoteBatch) -> list[Update]:
        """Return the per-token numbers of each block of workers for the batch of the last update."""
        task = self.submit(update_of, batch, KEYS, redo="until_done")
        self.wait(task)
        lasts = [one for rank, one in enumerate(task.values.result()) if self.group.spec.sizes.is_last(rank)]
        return [outcome.value for outcome in lasts if outcome.value is not None]

    # Weights

    @property
    def transfer_group(self) -> str:
        """The broadcast group in which workers send weights; new workers have none."""
        group = str(self._value("transfer_group"))
        self._life = self.group.num_respawns
        return group

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights from the workers, and wait until the last tensor is sent.

        Raises GroupLostError if workers were lost since `transfer_group` was read: the servers must restart the update.
        """
        try:
            timeout_s = min(_UPLOAD_TIMEOUTS * meta.timeout_s, self.group.spec.call_timeout_s)
            task = self.submit(_upload, args=(meta,), redo="never", timeout_s=timeout_s, life=self._life)
            meta.transfer.fingerprints |= self.wait(task).value
        except BaseException as error:
            meta.transfer.uploaded.set_exception(error)
            raise
        meta.transfer.uploaded.set_result(None)

    def _value(self, run: Run, *args: Any, redo: Redo = "until_done", **kwargs: Any) -> Any:
        """Run a method without a batch on every rank and return rank 0's value; `redo` is that of a Call."""
        return self.wait(self.submit(run, args=args, kwargs=kwargs, redo=redo)).value

    # Methods that only run on the workers: see the engine's class

    compute_logprobs = partialmethod(call, "compute_logprobs", output="logprobs", keys=TOKENS)
    compute_logp = compute_logprobs
    compute_values = partialmethod(call, "compute_values", output="values", keys=TOKENS[:2])
    compute_advantages = partialmethod(call, "compute_advantages")
    ppo_update = partialmethod(call, "ppo_update")
    describe = partialmethod(call, "describe")
    save = partialmethod(_value, "save")
    keep_rng = partialmethod(_value, "keep_rng", redo="in_step")
    keep_state = partialmethod(_value, "keep_state", redo="in_step")
    num_changes = property(partial(_value, run="num_changes"))
    frozen_weights = property(partial(_value, run="frozen_weights"))
    fingerprint = partialmethod(_value, "fingerprint")
    get_param_specs = partialmethod(_value, "get_param_specs")
    meeting_point = partialmethod(_value, _meeting_point)

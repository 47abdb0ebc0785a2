"""The engine of a role as its master sees it: the methods of the real one, which a group of workers runs.

A method that returns a tensor returns a pending `Column` at once, so that calls of several groups overlap; one that
changes the batch or returns numbers waits for its end. A batch that lies in the master is scattered, and what is
computed from it comes back as a tensor.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.api.errors import CheckpointError, GroupLostError
from arealite.api.io_struct import FinetuneSpec, FrozenWeights, ParamSpec, SaveLoadMeta, WeightUpdateMeta
from arealite.core.batch import Column, RemoteBatch
from arealite.core.group import Task, WorkerGroup
from arealite.core.worker import Call, Outcome, Redo, RoleName, Run
from arealite.engine.checkpointing import WRITE_TIMEOUT_S
from arealite.engine.ppo.actor import TOKENS
from arealite.rollout.account.updates import KEYS, Update, update_of
from arealite.utils import heartbeat
from arealite.utils.distributed import meeting_address
from arealite.utils.files import FileEntry
from arealite.utils.network import hold_port, port_of
from arealite.utils.threads import start_thread

_LOOK_AGAIN_S = 0.5
_UPLOAD_TIMEOUTS = 2  # of an update, in which the workers must have sent the weights: to meet servers, and to send

if TYPE_CHECKING:
    from arealite.core.workers import Workers


class RemoteEngine:
    """Stands for the engine of a role. `call` reaches every method that has no forwarder here."""

    def __init__(self, workers: Workers, group: WorkerGroup, role: str, make: Callable[[], Any], config: Any) -> None:
        self.config = config
        self.role, self.group = role, group
        self._workers = workers
        self._version = 0
        self._life: int | None = None  # of the group, when it told its broadcast group
        self.wait(group.add(role, make))

    # Life

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None, *, policy: RemoteEngine | None = None) -> None:
        """Load the model on every worker; a reference without weights of its own needs its policy in its group."""
        is_beside = policy is not None and policy.group is self.group
        kwargs: dict[str, Any] = {"policy": RoleName(policy.role)} if is_beside and policy is not None else {}
        self._value("initialize", addr, ft_spec, redo="always", **kwargs)
        self.model_config = self._value("model_config")

    def destroy(self) -> None:
        """Free the model on every worker; after an error not, as the workers end and another call may hang on them."""
        if sys.exc_info()[0] is not None:
            return
        with contextlib.suppress(GroupLostError):  # nothing is left to free
            self._value("destroy", redo="never")

    @property
    def parallelism_group(self) -> dist.ProcessGroup | None:
        """The master's own group, of one rank: statistics of the workers are reduced when they come here."""
        return dist.group.WORLD

    @property
    def num_changes(self) -> int:
        """How often the weights have changed."""
        return int(self._value("num_changes"))

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

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a Hugging Face checkpoint."""
        self._value("save", meta)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a Hugging Face checkpoint."""
        self._value("load", meta, redo="always" if self.config.optimizer is None else "in_step")

    # Checkpoints, as `CheckpointedEngine` has them

    def keep_rng(self) -> None:
        """Note the random generators of every worker."""
        self._value("keep_rng", redo="in_step")

    def keep_state(self) -> None:
        """Copy the shards of every worker to its memory."""
        self._value("keep_state", redo="in_step")

    def write_state(self, folder: str) -> dict[str, FileEntry]:
        """Let workers write what they kept, beside later calls, and wait for it (in a thread of the master)."""
        self._value(_begin_to_write, folder)
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while (written := self._value(_written)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the workers of {self.role} must write {folder} within {WRITE_TIMEOUT_S:g} s: they did not. Look "
                    "at their logs, and at the disk."
                )
            time.sleep(_LOOK_AGAIN_S)
        if isinstance(written, Exception):
            raise written
        return written

    def note_checkpoint(self) -> None:
        """Count the restarts of the workers from here on: the run would resume no earlier than this."""
        self.group.note_checkpoint()

    def read_state(self, folder: str) -> None:
        """Continue from what workers, or ranks of a script, wrote."""
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
        """Run a method of the engine, by name, or a function `f(engine, batch, **kw)` on a batch and wait for its end.

        Returns the value of rank 0; a tensor comes as a column if `output` gives it a name, and then the call is
        pending. What the call adds to the batch is added here as well. `keys` are what it sees, by default all.
        """
        home = self._workers.scatter(batch) if isinstance(batch, TensorDict) else batch
        task = self.submit(run, home, keys, args=args, kwargs=kw, output=output or None)
        if output:
            column = Column(task.pieces, output)
            return column if home is batch else self._workers.fetch(column, home)
        outcome = self.wait(task)
        for key in outcome.made:
            home[key] = Column(task.pieces, key)
            if isinstance(batch, TensorDict):
                batch[key] = self._workers.fetch(home[key], home)
        return outcome.value

    def submit(
        self, run: Run, batch: RemoteBatch | None = None, keys: Sequence[str] = (), *, name: str = "", **more: Any
    ) -> Task:
        """Let the workers run something when it is its turn, on a batch or on none; return at once.

        Of the batch they get `keys` (by default all) and `attention_mask`, without which the rest can't be unpacked;
        `more` are other fields of a Call.
        """
        if batch is not None:
            more["batch"] = batch.select(keys)
        name = name or f"{self.role}.{run if isinstance(run, str) else run.__name__.strip('_')}"
        return self.group.submit(Call(name, self.role, run, **more))

    def wait(self, task: Task) -> Outcome:
        """Wait for the end of a call, and return what became of it on rank 0."""
        with heartbeat.waiting(f"{task.call.name} on the workers of group {self.group.spec.name}", on="ranks"):
            outcome = task.values.result()[0]  # the group has deadlines
        heartbeat.tick()
        return outcome

    def compute_logprobs(self, batch: RemoteBatch, *, whole: bool = False) -> Column:
        """Return the pending logprobs of every token under the current weights."""
        return self.call("compute_logprobs", batch, output="logprobs", keys=TOKENS, whole=whole)

    compute_logp = compute_logprobs

    def compute_values(self, batch: RemoteBatch) -> Column:
        """Return the pending values of every token, of a critic."""
        return self.call("compute_values", batch, output="values", keys=TOKENS[:2])

    def compute_advantages(self, batch: RemoteBatch) -> None:
        """Add advantages, and for a critic returns and their mask, to the batch."""
        self.call("compute_advantages", batch)

    def ppo_update(self, batch: RemoteBatch) -> dict[str, float]:
        """Take the optimizer steps of one batch, and return metrics."""
        return self.call("ppo_update", batch)

    def describe(self, batch: RemoteBatch) -> dict[str, float]:
        """Return the metrics of the batch itself."""
        return self.call("describe", batch)

    def updates_of(self, batch: RemoteBatch) -> list[Update]:
        """Return what each worker computed per token of the batch that it was trained on last."""
        task = self.submit(update_of, batch, KEYS, redo="until_done")
        self.wait(task)
        return [outcome.value for outcome in task.values.result() if outcome.value is not None]

    # Weights

    def get_param_specs(self, weight_chunked_mem_mb: int = 1024, num_senders: int | None = 1) -> list[list[ParamSpec]]:
        """Return name, full shape and dtype of every tensor in send order, in buckets, and who sends it."""
        return self._value("get_param_specs", weight_chunked_mem_mb, num_senders)

    def fingerprint(self) -> str:
        """Return a checksum of the parameters."""
        return str(self._value("fingerprint"))

    @property
    def frozen_weights(self) -> FrozenWeights | None:
        """What training never changes, with LoRA."""
        return self._value("frozen_weights")

    def meeting_point(self, toward: str) -> tuple[str, int, bool]:
        """Return where rank 0 of the group will listen for servers on a host, and whether it has a GPU."""
        return self._value(_meeting_point, toward)

    @property
    def transfer_group(self) -> str:
        """The broadcast group in which workers send weights; new ones are in none."""
        group = str(self._value("transfer_group"))
        self._life = self.group.num_respawns
        return group

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights from the workers, and wait until the last tensor was sent.

        Raises GroupLostError if workers were lost since `transfer_group` was asked for: the servers must begin again.
        """
        try:
            timeout_s = min(_UPLOAD_TIMEOUTS * meta.timeout_s, self.group.spec.call_timeout_s)
            task = self.submit(_upload, args=(meta,), redo="never", timeout_s=timeout_s, life=self._life)
            meta.fingerprints |= self.wait(task).value
        except BaseException as error:
            meta.uploaded.set_exception(error)
            raise
        meta.uploaded.set_result(None)

    def _value(self, run: Run, *args: Any, redo: Redo = "until_done", **kwargs: Any) -> Any:
        """Run a method without a batch on every rank and return rank 0's value; `redo` is that of a Call."""
        return self.wait(self.submit(run, args=args, kwargs=kwargs, redo=redo)).value


def _begin_to_write(engine: Any, folder: str) -> None:
    """Start to write the state in a thread of this rank."""
    engine.written = start_thread(engine.write_state, folder)


def _written(engine: Any) -> Any:
    """Return the files, or the error, of a write that has ended."""
    if not hasattr(engine, "written"):
        return GroupLostError("a checkpoint must not lose its workers: others replaced them. The next one is whole.")
    return (engine.written.exception() or engine.written.result()) if engine.written.done() else None


def _meeting_point(engine: Any, toward: str) -> tuple[str, int, bool]:
    """Hold a port of this node, until the next one, for a sender that reaches the host `toward` from its address."""
    address = meeting_address(toward)
    engine.held_port = hold_port(address)  # the last one closes with its last reference
    return address, port_of(engine.held_port), torch.cuda.is_available()


def _upload(engine: Any, meta: WeightUpdateMeta) -> dict[str, str]:
    """Send the weights and return what rank 0 has found out about them."""
    engine.upload_weights(meta)
    return meta.fingerprints

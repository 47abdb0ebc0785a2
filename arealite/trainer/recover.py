"""Checkpoints from which an interrupted run resumes as if nothing had happened, `<run>/recover/step_<N>`.

A checkpoint holds all that the steps after N depend on; `save` copies it to memory, and a thread writes it during the
next steps. Invariants: a published checkpoint is whole (see `checkpoint`), and a failed write stops the run.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map_only

from arealite.api.cli_args import RecoverConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import OF_LAUNCHER, RunFolder
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.trainer import checkpoint
from arealite.trainer.records import scores_of_steps
from arealite.utils import distributed, stop
from arealite.utils.environment import RESTART_VARIABLE
from arealite.utils.files import aside, empty_folder, explain, file_lock, fresh_folder, read_jsonl
from arealite.utils.frequency import Frequency
from arealite.utils.heartbeat import waiting
from arealite.utils.seeding import rng_state, seed_everything, set_rng_state

logger = logging.getLogger("arealite.recover")

_FACTS = "state.json"
_RNG = "rng_{}.json"  # state of the random generators, by rank
_FORMAT = 2  # of checkpoints; it changes when their contents do

LOCK_TIMEOUT_S = 120.0  # for a killed predecessor to end; a file server keeps the lock of a dead node for 90 s
WRITE_TIMEOUT_S = 1800.0  # of one checkpoint
_FAILED_RANK_WRITE_TIMEOUT_S = 60.0  # of the write under way when this rank has failed and should end


class Recover:
    """Finds the checkpoint to resume from, and saves new ones. Every rank calls every method.

    Create it before anything writes into the run folder: it locks the folder, and moves an earlier run aside unless
    this run resumes from it.
    """

    def __init__(self, config: RecoverConfig, ft_spec: FinetuneSpec) -> None:
        self._config = config
        self._run = RunFolder(config)
        self._folder = self._run.recover
        self._frequency = Frequency(config, ft_spec.steps_per_epoch)
        self._write: _Write | None = None
        self._lock = ExitStack()
        self._after_step: _AfterStep | None = None
        self._found: Path | None = None
        if distributed.global_rank() == 0:
            self._lock.enter_context(file_lock(self._run.trainer_lock, timeout_s=LOCK_TIMEOUT_S))
            self._found = _choose(self._folder, config.mode)
            if self._found is None:
                empty_folder(self._run.path, keep=OF_LAUNCHER)

    def load(
        self,
        engine: FSDPEngine,
        dataloader: Stateful,
        *,
        critic: FSDPEngine | None = None,
        rollout: InferenceEngine | None = None,
        clocks: Mapping[str, Stateful] | None = None,
    ) -> int:
        """Restore all objects from the checkpoint and return the first step to do, 0 without one.

        Call it before the first episode starts. `save` writes the state of the same objects: tensors of the engines,
        plain data of the others.
        """
        self._engine, self._critic, self._rollout = engine, critic, rollout
        self._parts: dict[str, Stateful] = {"dataloader": dataloader, "recover": self._frequency, **(clocks or {})}
        if rollout is not None:
            self._parts["rollout"] = rollout
        found: list[Path | None] = [self._found]
        dist.broadcast_object_list(found, src=0)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_S))
        if found[0] is None:
            return 0
        step = self._read(found[0])
        if distributed.global_rank() == 0:
            for path in _undone(self._folder, step):  # newer than this one, and damaged
                path.rename(aside(path, "damaged"))
            for path in _undone(self._run.checkpoints, step):
                checkpoint.remove(path)
            print(f"resuming after step {step} from {found[0]}", flush=True)
        return step + 1

    def save(self, step: int) -> None:
        """Start to write a checkpoint after step `step` if one is due; raise if the last one could not be written, and
        RunStopped on every rank if any was asked to stop (collective).

        With a rollout engine, call it after publish_weights: the ledger knows what was trained on by version.
        """
        has_ended, continues = distributed.all_reduce_numbers(
            [self._write is None or not self._write.thread.is_alive(), not stop.is_asked()], dist.ReduceOp.MIN
        )
        if self._config.mode != "disabled":
            self._keep(step, has_ended=bool(has_ended))
        if not continues:
            raise stop.stopped()

    def _keep(self, step: int, *, has_ended: bool) -> None:
        version = self._engine.get_version()
        if self._rollout is not None and version != step + 1:
            raise CheckpointError(
                f"a checkpoint of step {step} must be taken at version {step + 1}: got {version}. "
                "Call publish_weights(actor, rollout, version=step + 1) before recover.save(step)."
            )
        if has_ended:
            self._settle()
        is_due = self._frequency.check()
        facts: dict[str, Any] = {"format": _FORMAT, "step": step, "world_size": dist.get_world_size()}
        facts |= {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}
        self._after_step = _AfterStep(facts, rng_state(), self._num_changes)
        if is_due:
            self._settle()
            self._start_write(self._after_step)

    @property
    def _num_changes(self) -> int:
        return self._engine.num_changes + (0 if self._critic is None else self._critic.num_changes)

    def _shards(self) -> dict[str, Any]:
        """Return the state of the engines."""
        critic = {} if self._critic is None else {"critic": self._critic.state_dict()}
        return self._engine.state_dict() | critic

    def _start_write(self, state: _AfterStep) -> None:
        """Copy the tensors, which the next step changes, to memory, and have all written."""
        shards, path = self._shards(), self._folder / f"step_{state.facts['step']}"
        copied = tree_map_only(torch.Tensor, lambda shard: shard.detach().to("cpu", copy=True), shards)
        self._write = _Write(path, state.facts, copied, state.rng, self._group, self._config.keep_last)
        self._after_step = None

    def __enter__(self) -> Recover:
        self._lock.enter_context(stop.obeying())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the write under way, release the folder, and raise a failed write unless the run itself failed.

        A run that was asked to stop leaves a checkpoint of its last step.
        """
        is_stop = isinstance(error, stop.RunStopped)
        failure = self._finish(WRITE_TIMEOUT_S if error is None or is_stop else _FAILED_RANK_WRITE_TIMEOUT_S)
        state = self._after_step
        if is_stop and failure is None and state is not None and state.num_changes == self._num_changes:
            self._start_write(state)
            failure = self._finish(WRITE_TIMEOUT_S)
        self._lock.close()
        if failure is not None:
            if error is None:
                raise failure
            logger.error("%s", failure)

    def _settle(self) -> None:
        """Wait for the write under way, if any (collective)."""
        if self._write is not None:
            distributed.raise_on_every_rank(self._finish(WRITE_TIMEOUT_S))

    def _finish(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the write under way; report it to the rollout engine, or return the error."""
        write, self._write = self._write, None
        if write is None:
            return None
        with waiting(f"{write.path.name} to be written to {self._folder}", on="disk"):
            write.thread.join(timeout_s)
        if write.thread.is_alive():
            return CheckpointError(
                f"{write.path} must be written within {timeout_s:g} s: it was not. Look at the disk and at other ranks."
            )
        if write.error is None:
            self._note(write.facts)
        return write.error

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Report a published checkpoint to the rollout engine."""
        if self._rollout is not None and distributed.global_rank() == 0:
            self._rollout.note_checkpoint(facts["step"], facts["rollout"]["ledger_position"])

    def _read(self, path: Path) -> int:
        """Read a checkpoint (collective) and return its step."""
        facts = json.loads((path / _FACTS).read_bytes())
        if facts.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} must have format {_FORMAT}: got {facts.get('format')}. Use the AReaLite that wrote it."
            )
        shards = self._shards()
        try:
            state_dict_loader.load(shards, checkpoint_id=path, process_group=self._group)
        except CheckpointException as failed:
            raise CheckpointError(
                f"{path} must fit the model: got {_cause_of(failed)}. Use the configuration of the run."
            ) from failed
        self._engine.load_state_dict(shards)
        if self._critic is not None:
            self._critic.load_state_dict(shards["critic"])
        for name, part in self._parts.items():
            part.load_state_dict(facts[name])
        self._note(facts)  # the process that published it may have died before it did this
        rank, step = dist.get_rank(), int(facts["step"])
        if rank < facts["world_size"]:
            set_rng_state(json.loads((path / _RNG.format(rank)).read_bytes()))
        else:  # a new rank
            seed_everything(random.Random(f"{self._engine.config.seed}-{rank}-{step}").getrandbits(63))
        return step


@dataclass(frozen=True)
class _AfterStep:
    """What a checkpoint of the last step holds besides its tensors, which nothing changes before the next update."""

    facts: dict[str, Any]
    rng: dict[str, Any]
    num_changes: int  # of the weights


@dataclass
class _Write:
    """A checkpoint that is being written, in a thread of every rank off the critical path.

    The threads agree after each phase, over a group that nothing else uses, so it is published only if every rank has
    written its part. DCP's own `async_save` covers the shards alone: hashing and fsync would then block the loop.
    """

    path: Path
    facts: dict[str, Any]
    shards: dict[str, Any]
    rng: dict[str, Any]
    group: dist.ProcessGroup
    keep_last: int

    def __post_init__(self) -> None:
        self.error: CheckpointError | None = None
        self._unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        self.thread = threading.Thread(target=self._run, name="arealite-checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            distributed.on_rank_0(lambda: fresh_folder(self._unfinished), self.group)
            files = distributed.agreed(self._write_files, self.group)
            entries = [files] * dist.get_world_size(self.group)
            dist.all_gather_object(entries, files, group=self.group)
            whole = {name: entry for part in entries for name, entry in part.items()}
            distributed.on_rank_0(lambda: self._publish(whole), self.group)
        except Exception as error:
            self.error = CheckpointError(explain(error, self.path))
            self.error.__cause__ = error

    def _write_files(self) -> dict[str, checkpoint.Entry]:
        """Write this rank's files and return their entries of the manifest."""
        folder, rank = self._unfinished, dist.get_rank()
        try:
            state_dict_saver.save(self.shards, checkpoint_id=folder, process_group=self.group)
        except CheckpointException as failed:
            raise _cause_of(failed) from None
        texts = {_RNG.format(rank): self.rng} | ({_FACTS: self.facts} if rank == 0 else {})
        for name, content in texts.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        shards = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        return checkpoint.entries_of(folder, [*texts, *shards, *([".metadata"] if rank == 0 else [])])

    def _publish(self, files: Mapping[str, checkpoint.Entry]) -> None:
        checkpoint.publish(self._unfinished, self.path, files)
        folder = self.path.parent
        steps = [step for step, _ in checkpoint.checkpoints(folder)]
        scores = scores_of_steps(read_jsonl(RunFolder(folder.parent).metrics), steps)
        checkpoint.prune(folder, keep_last=self.keep_last, scores=scores)


def _choose(folder: Path, mode: str) -> Path | None:
    """Return the newest whole checkpoint if this run is to resume."""
    if mode == "disabled":
        return None
    if mode == "fault" and os.environ.get(RESTART_VARIABLE) != "1" and not distributed.is_restarted():
        return None
    found = checkpoint.checkpoints(folder)
    for _, path in found:
        damage = checkpoint.find_damage(path)
        if damage is None:
            _check_owner(path)
            return path
        logger.warning("%s can't be used: %s", path, damage)
    if found:
        raise CheckpointError(
            f"{folder} must hold a whole checkpoint: got {len(found)} damaged ones. Move it away to start afresh."
        )
    if mode == "resume":
        raise CheckpointError(
            f"{folder} must hold a checkpoint for recover.mode=resume: got none. Set recover.mode=auto to start afresh."
        )
    return None


def _check_owner(path: Path) -> None:
    """Refuse a checkpoint with files of somebody else: PyTorch unpickles them, so they may run code."""
    for file in path.iterdir():
        if (owner := file.stat().st_uid) != os.geteuid():
            raise CheckpointError(
                f"{file} must be yours, because loading a checkpoint may run code: got one of user {owner}. "
                f"Copy {path.name}, if you trust it."
            )


def _undone(folder: Path, step: int) -> list[Path]:
    """Return the folders of steps after `step`, which will be redone; remove unfinished ones."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)
    return [path for later, path in checkpoint.checkpoints(folder) if later > step]


def _cause_of(failed: CheckpointException) -> Exception:
    """Return the error of the first rank that failed."""
    cause = failed.failures[min(failed.failures)][0]
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))

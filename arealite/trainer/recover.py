"""Checkpoints from which an interrupted run resumes exactly, `<run>/recover/step_<N>`.

A checkpoint has everything that the steps after N depend on: a folder per engine, such as `actor/`, written by its
ranks, and `state.json`. `save` copies the state to memory, and a thread writes it during the next steps. Invariants: a
published checkpoint is complete (see `checkpoint`), and a failed write stops the run.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from arealite.api.cli_args import RecoverConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import CheckpointError, GroupLostError
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import OF_LAUNCHER, RunFolder
from arealite.api.run_metrics import scores_of_steps
from arealite.engine.checkpointing import WRITE_TIMEOUT_S
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.trainer import checkpoint
from arealite.utils import distributed, stop
from arealite.utils.files import aside, empty_folder, explain, file_entries, file_lock, fresh_folder, rows_of
from arealite.utils.frequency import Frequency
from arealite.utils.heartbeat import waiting
from arealite.utils.processes import RESTART_VARIABLE
from arealite.utils.seeding import rng_state, set_rng_state
from arealite.utils.terminal import listed

logger = logging.getLogger("arealite.recover")

_FACTS = "state.json"
_FORMAT = 3  # increase it when the contents of checkpoints change

LOCK_TIMEOUT_S = 120.0  # a file server keeps the lock of a dead node for 90 s
_FAILED_RANK_WRITE_TIMEOUT_S = 60.0  # wait for the current write after this rank has failed


class Recover:
    """Finds the checkpoint to resume from, and saves new checkpoints. Every rank calls every method.

    Create it before anything writes into the run folder: it locks the folder, and moves an earlier run aside unless
    this run resumes it.
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
        rollout: InferenceEngine | None = None,
        clocks: Mapping[str, Stateful] | None = None,
        **engines: FSDPEngine | None,
    ) -> int:
        """Restore all objects from the checkpoint and return the next step, 0 without a checkpoint.

        Call it before the first episode starts. `save` writes the state of the same objects: the tensors of the engines
        (`engines` are further trained engines, e.g. `critic=`) and plain data of the others.
        """
        self._engine, self._rollout = engine, rollout
        self._engines = {"model" if rollout is None else "actor": engine}  # names of config blocks
        assert self._engines.keys().isdisjoint(engines), f"{[*engines]} must not have the name of the first engine"
        self._engines |= {name: extra for name, extra in engines.items() if extra is not None}
        self._parts: dict[str, Stateful] = {"dataloader": dataloader, "recover": self._frequency, **(clocks or {})}
        if rollout is not None:
            self._parts["rollout"] = rollout
        path = distributed.from_rank_0(self._found)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_S))
        if path is None:
            return 0
        step = self._read(path)
        if distributed.global_rank() == 0:
            for newer in _undone(self._folder, step):  # damaged
                newer.rename(aside(newer, "damaged"))
            for newer in _undone(self._run.checkpoints, step):
                checkpoint.remove(newer)
            print(f"resuming after step {step} from {path}", flush=True)
        return step + 1

    def save(self, step: int) -> None:
        """Start to write a checkpoint after step `step` if one is due (collective).

        Raises the error of the previous write, and RunStopped on every rank if any rank got a signal to stop. With a
        rollout engine, call it after publish_weights: the ledger marks trained prompts by version.
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
        facts: dict[str, Any] = {"format": _FORMAT, "step": step, "engines": list(self._engines), "rng": rng_state()}
        facts |= {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}
        for engine in self._engines.values():
            engine.keep_rng()
        self._after_step = _AfterStep(facts, self._num_changes)
        if is_due:
            self._settle()
            self._start_write(self._after_step)

    @property
    def _num_changes(self) -> int:
        return sum(engine.num_changes for engine in self._engines.values())

    def _start_write(self, state: _AfterStep) -> None:
        """Copy the tensors to memory, because the next step changes them, and start the write."""
        for engine in self._engines.values():
            engine.keep_state()
        path = self._folder / f"step_{state.facts['step']}"
        self._write = _Write(path, state.facts, self._engines, self._group, self._config.keep_last)
        self._after_step = None

    def __enter__(self) -> Recover:
        self._lock.enter_context(stop.obeying())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for the current write, release the folder, and raise the error of the write unless the run failed.

        A run that was stopped leaves a checkpoint of its last step.
        """
        is_stop = isinstance(error, stop.RunStopped)
        failure = self._finish(WRITE_TIMEOUT_S if error is None or is_stop else _FAILED_RANK_WRITE_TIMEOUT_S)
        state = self._after_step
        if is_stop and failure is None and state is not None:
            failure = self._write_last(state)
        self._lock.close()
        if failure is not None:
            if error is None:
                raise failure
            logger.error("%s", failure)

    def _write_last(self, state: _AfterStep) -> CheckpointError | None:
        """Write a checkpoint of the last step unless an update has begun since; return the error."""
        try:
            if state.num_changes != self._num_changes:
                return None
            self._start_write(state)
        except GroupLostError as lost:  # workers of a master, which a cluster stops with it
            return CheckpointError(f"step {state.facts['step']}, the last one, has no checkpoint: {lost}")
        return self._finish(WRITE_TIMEOUT_S)

    def _settle(self) -> None:
        """Wait for the write under way, if any (collective)."""
        if self._write is not None:
            distributed.raise_on_every_rank(self._finish(WRITE_TIMEOUT_S))

    def _finish(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the current write; report the checkpoint to the rollout engine, or return the error."""
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
        elif isinstance(write.error.__cause__, GroupLostError):  # the master replaced its workers
            logger.warning("%s", write.error)
            return None
        return write.error

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Report a published checkpoint to the engines."""
        for engine in self._engines.values():
            engine.note_checkpoint()
        if self._rollout is not None and distributed.global_rank() == 0:
            self._rollout.note_checkpoint(facts["step"], facts["rollout"]["ledger_position"])

    def _read(self, path: Path) -> int:
        """Read a checkpoint (collective) and return its step."""
        facts = json.loads((path / _FACTS).read_bytes())
        if facts.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} must have format {_FORMAT}: got {facts.get('format')}. Use the AReaLite that wrote it."
            )
        if facts["engines"] != list(self._engines):
            raise CheckpointError(
                f"{path} must hold the state of {' and '.join(self._engines)}: got that of "
                f"{' and '.join(facts['engines'])}. Use the configuration of the run."
            )
        if missing := [name for name in self._parts if name not in facts]:
            raise CheckpointError(
                f"{path} must hold the state of {listed(self._parts)}: got none of {listed(missing)}. Load the objects "
                "that the run has saved, or start afresh with recover.mode=disabled."
            )
        for name, engine in self._engines.items():
            engine.read_state(str(path / name))
        for name, part in self._parts.items():
            part.load_state_dict(facts[name])
        self._note(facts)  # the process that published the checkpoint may have died before
        if distributed.global_rank() == 0:
            set_rng_state(facts["rng"])
        return int(facts["step"])


@dataclass(frozen=True)
class _AfterStep:
    """The checkpoint data of the last step except engines, whose tensors change only in the next update."""

    facts: dict[str, Any]
    num_changes: int


@dataclass
class _Write:
    """The write of a checkpoint, in a thread of every rank off the critical path.

    The threads agree after each phase, over groups reserved for them, so a checkpoint is published only if every rank
    has written its part. DCP's `async_save` covers only the shards: hashing and fsync would then block the loop.
    """

    path: Path
    facts: dict[str, Any]
    engines: Mapping[str, FSDPEngine]
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
            files = {
                f"{name}/{file}": entry
                for name, engine in self.engines.items()
                for file, entry in engine.write_state(str(self._unfinished / name)).items()
            }
            distributed.on_rank_0(lambda: self._publish(files), self.group)
        except Exception as error:
            self.error = CheckpointError(explain(error, self.path))
            self.error.__cause__ = error

    def _publish(self, files: dict[str, Any]) -> None:
        (self._unfinished / _FACTS).write_text(json.dumps(self.facts), encoding="utf-8")
        checkpoint.publish(self._unfinished, self.path, files | file_entries(self._unfinished, [_FACTS]))
        folder = self.path.parent
        steps = [step for step, _ in checkpoint.checkpoints(folder)]
        scores = scores_of_steps(rows_of(RunFolder(folder.parent).metrics), steps)
        checkpoint.prune(folder, keep_last=self.keep_last, scores=scores)


def _choose(folder: Path, mode: str) -> Path | None:
    """Return the newest complete checkpoint if this run resumes."""
    if mode == "disabled":
        return None
    if mode == "fault" and os.environ.get(RESTART_VARIABLE) != "1" and not distributed.is_restarted():
        return None
    known = checkpoint.checkpoints(folder)
    for _, path in known:
        damage = checkpoint.find_damage(path)
        if damage is None:
            _check_owner(path)
            return path
        logger.warning("%s can't be used: %s", path, damage)
    if known:
        raise CheckpointError(
            f"{folder} must hold a whole checkpoint: got {len(known)} damaged ones. Move it away to start afresh."
        )
    if mode == "resume":
        raise CheckpointError(
            f"{folder} must hold a checkpoint for recover.mode=resume: got none. Set recover.mode=auto to start afresh."
        )
    return None


def _check_owner(path: Path) -> None:
    """Refuse a checkpoint with files of another user: PyTorch unpickles them, so they may run code."""
    for file in (*path.iterdir(), *path.glob("*/*")):  # a folder may be a link, which rglob would not follow
        if (owner := file.stat().st_uid) != os.geteuid():
            raise CheckpointError(
                f"{file} must be yours, because loading a checkpoint may run code: got one of user {owner}. "
                f"Copy {path.name}, if you trust it."
            )


def _undone(folder: Path, step: int) -> list[Path]:
    """Return the folders of steps after `step`, which the run repeats; remove unfinished folders."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)
    return [path for later, path in checkpoint.checkpoints(folder) if later > step]

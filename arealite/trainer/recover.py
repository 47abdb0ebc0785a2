"""Checkpoints from which an interrupted run resumes as if nothing had happened, `<run>/recover/step_<N>`.

A checkpoint holds all that the steps after N depend on; `save` copies it to memory, and a thread writes it during the
next steps. Invariants: a published checkpoint is whole (see `checkpoint`), and a failed write stops the run.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from arealite.api.cli_args import RecoverConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import RunFolder
from arealite.trainer import checkpoint
from arealite.trainer.checkpoint_writer import FACTS, Snapshot, Write, cause_of, on_cpu, rng_name
from arealite.trainer.records import summarize
from arealite.utils.distributed import all_reduce_numbers, is_restarted, raise_on_every_rank
from arealite.utils.environment import RESTART_VARIABLE
from arealite.utils.file_lock import file_lock
from arealite.utils.files import read_jsonl
from arealite.utils.frequency import Frequency
from arealite.utils.seeding import rng_state, seed_everything, set_rng_state

logger = logging.getLogger("arealite.recover")

_FORMAT = 1
"""Format of checkpoints; it changes when their contents do."""

LOCK_TIMEOUT_S = 120.0
"""Timeout for a killed predecessor to end; a file server keeps the lock of a dead node for 90 s."""
WRITE_TIMEOUT_S = 1800.0
"""Timeout of one checkpoint."""
_FAILED_RANK_WRITE_TIMEOUT_S = 60.0
"""Timeout of the write under way when this rank has failed and should end."""


class Stateful(Protocol):
    """An object whose state is plain data: a data loader, a saver, the rollout engine."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainedEngine(Stateful, Protocol):
    """An engine whose state is shards (see `FSDPEngine.state_dict`); its config has the seed for new ranks."""

    @property
    def config(self) -> Any: ...

    def get_version(self) -> int: ...


class RolloutState(Stateful, Protocol):
    """Remembers the outcome of each prompt; `state_dict` is empty on ranks other than 0."""

    def note_checkpoint(self, step: int, position: int) -> None: ...


class Recover:
    """Finds the checkpoint to resume from, and saves new ones. Every rank calls every method.

    Create it before anything writes into the run folder: it locks the folder, and removes an earlier run's state
    unless this run resumes from it.
    """

    def __init__(self, config: RecoverConfig, ft_spec: FinetuneSpec) -> None:
        self._is_enabled = config.mode != "disabled"
        self._keep_last = config.keep_last
        self._run = RunFolder(config)
        self._folder = self._run.recover
        self._frequency = Frequency.from_config(config, ft_spec)
        self._write: Write | None = None
        self._lock = ExitStack()
        self._found: Path | None = None
        if _rank() == 0:
            self._lock.enter_context(file_lock(self._run.trainer_lock, timeout_s=LOCK_TIMEOUT_S))
            self._found = _choose(self._folder, config.mode)
            if self._found is None:
                _replace(self._run)

    def load(
        self,
        engine: TrainedEngine,
        dataloader: Stateful,
        *,
        rollout: RolloutState | None = None,
        clocks: Mapping[str, Stateful] | None = None,
    ) -> int:
        """Restore all objects from the checkpoint and return the first step to do, 0 without one.

        Call it before the first episode starts. `save` writes the state of the same objects.
        """
        self._engine, self._rollout = engine, rollout
        self._parts: dict[str, Stateful] = {"dataloader": dataloader, "recover": self._frequency, **(clocks or {})}
        found: list[Path | None] = [self._found]
        dist.broadcast_object_list(found, src=0)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_S))
        if found[0] is None:
            return 0
        step = self._read(found[0])
        if _rank() == 0:
            for folder in (self._folder, self._run.checkpoints):
                _remove_undone(folder, step)
            print(f"resuming after step {step} from {found[0]}", flush=True)
        return step + 1

    def save(self, step: int) -> None:
        """Start to write a checkpoint after step `step` if one is due; raise if the last one could not be written.

        With a rollout engine, call it after publish_weights: the ledger knows what was trained on by version.
        """
        if not self._is_enabled:
            return
        version = self._engine.get_version()
        if self._rollout is not None and version != step + 1:
            raise CheckpointError(
                f"a checkpoint of step {step} must be taken at version {step + 1}: got {version}. "
                "Call publish_weights(actor, rollout, version=step + 1) before recover.save(step)."
            )
        self._settle(wait=False)
        if self._frequency.check():
            self._settle(wait=True)
            self._write = Write(self._folder, step, self._snapshot(step), group=self._group, keep_last=self._keep_last)

    def __enter__(self) -> Recover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the write under way, release the folder, and raise a failed write unless the run itself failed."""
        failure = self._finish(WRITE_TIMEOUT_S if error is None else _FAILED_RANK_WRITE_TIMEOUT_S)
        self._lock.close()
        if failure is not None and error is None:
            raise failure
        if failure is not None:
            logger.error("%s", failure)

    def _settle(self, *, wait: bool) -> None:
        """Finish a write that has ended on every rank, or wait for it (collective)."""
        if self._write is None:
            return
        (has_ended,) = all_reduce_numbers([float(wait or self._write.has_ended)], dist.ReduceOp.MIN)
        if has_ended:
            raise_on_every_rank(self._finish(WRITE_TIMEOUT_S))

    def _finish(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the write under way; report it to the rollout engine, or return the error."""
        write, self._write = self._write, None
        if write is None:
            return None
        error = write.end(timeout_s)
        if error is None:
            self._note(write.snapshot.facts)
        return error

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Report a published checkpoint to the rollout engine."""
        if self._rollout is not None and _rank() == 0:
            self._rollout.note_checkpoint(facts["step"], facts["rollout"]["ledger_position"])

    def _snapshot(self, step: int) -> Snapshot:
        """Copy to memory everything that the next step changes."""
        facts: dict[str, Any] = {"format": _FORMAT, "step": step, "world_size": dist.get_world_size()}
        facts |= {name: part.state_dict() for name, part in self._parts.items()}
        if self._rollout is not None:
            facts["rollout"] = self._rollout.state_dict()
        return Snapshot(facts, shards=on_cpu(self._engine.state_dict()), rng=rng_state())

    def _read(self, path: Path) -> int:
        """Read a checkpoint (collective) and return its step."""
        facts = json.loads((path / FACTS).read_bytes())
        if facts.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} must have format {_FORMAT}: got {facts.get('format')}. Use the AReaLite that wrote it."
            )
        shards = self._engine.state_dict()
        try:
            state_dict_loader.load(shards, checkpoint_id=path, process_group=self._group)
        except CheckpointException as failed:
            raise CheckpointError(
                f"{path} must fit the model: got {cause_of(failed)}. Use the configuration of the run."
            ) from failed
        self._engine.load_state_dict(shards)
        for name, part in self._parts.items():
            part.load_state_dict(facts[name])
        if self._rollout is not None:
            self._rollout.load_state_dict(facts["rollout"] if _rank() == 0 else {})
        self._note(facts)  # the process that published it may have died before it did this
        self._restore_rng(path, facts)
        return int(facts["step"])

    def _restore_rng(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Restore the generators of this rank; a new rank is seeded by seed, rank and step."""
        rank = dist.get_rank()
        if rank < facts["world_size"]:
            set_rng_state(json.loads((path / rng_name(rank)).read_bytes()))
        else:
            seed_everything(random.Random(f"{self._engine.config.seed}-{rank}-{facts['step']}").getrandbits(63))


def _choose(folder: Path, mode: str) -> Path | None:
    """Return the newest whole checkpoint if this run is to resume."""
    if mode == "disabled" or (mode == "fault" and os.environ.get(RESTART_VARIABLE) != "1" and not is_restarted()):
        return None
    found = checkpoint.checkpoints(folder)
    for _, path in found:
        damage = checkpoint.find_damage(path)
        if damage is None:
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


def _replace(run: RunFolder) -> None:
    """Remove an earlier run's checkpoints, ledger and rollouts; `StatsLogger` removes its metrics."""
    rows, ledger = read_jsonl(run.metrics), list(run.path.glob(f"{run.ledger.name}*"))
    if rows or ledger or run.recover.exists():
        num_steps = summarize(rows, max_head_offpolicyness=None)["steps"]
        print(f"replacing the run of {num_steps} steps in {run.path}", flush=True)
    checkpoint.remove(run.recover)  # first and at once: a checkpoint is worth nothing without its ledger
    for path in ledger:
        path.unlink()
    shutil.rmtree(run.rollouts, ignore_errors=True)


def _remove_undone(folder: Path, step: int) -> None:
    """Remove unfinished folders and those of steps after `step`, which will be redone."""
    for later, path in checkpoint.checkpoints(folder):
        if later > step:
            checkpoint.remove(path)
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)


def _rank() -> int:
    """Return the rank, also before torch.distributed is initialised."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

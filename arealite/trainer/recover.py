"""Checkpoints from which an interrupted run goes on as if nothing had happened, `<run>/recover/step_<N>`.

A checkpoint holds whatever the steps after N depend on: weights, optimizer and schedule in shards that any number of
ranks can read, the random generators of every rank, the data cursor, what became of the prompts (`rollout.state_dict`),
and clocks. `save` only copies that to memory; a thread writes it while training goes on. Invariants: a published
checkpoint is whole (see `checkpoint`); a failed write stops the run; nobody else writes into the folder of a run.
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
"""Of checkpoints; another one when what they hold changes."""

LOCK_TIMEOUT_S = 120.0
"""So long may the end of a killed predecessor take; a file server keeps the lock of a machine that is gone for 90 s."""
WRITE_TIMEOUT_S = 1800.0
"""So long may writing one checkpoint take."""
_LAST_WORDS_S = 60.0
"""So long may it keep a rank that has failed from ending."""


class Stateful(Protocol):
    """Has a state that is plain data: a data loader, a saver, the rollout engine."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainedEngine(Stateful, Protocol):
    """Has a state of shards (see `FSDPEngine.state_dict`) and a seed for ranks that have no state of their own."""

    @property
    def config(self) -> Any: ...

    def get_version(self) -> int: ...


class RolloutState(Stateful, Protocol):
    """Remembers what became of prompts; `state_dict` is empty on ranks other than 0."""

    def note_checkpoint(self, step: int, position: int) -> None: ...


class Recover:
    """Finds the checkpoint that a run goes on from, and saves new ones. Every rank calls every method.

    Create it before anything writes into the run folder, which belongs to this run from then on: what an earlier run
    left there is replaced unless this one goes on from it.
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
        """Bring everything to where the checkpoint was taken; return the first step to do, 0 without one.

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
            print(f"going on after step {step}, from {found[0]}", flush=True)
        return step + 1

    def save(self, step: int) -> None:
        """Begin to write a checkpoint after step `step` if it is time; raise if the last one could not be written.

        With a rollout engine it must come after the publication: what it trained on is told by version.
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
        """Wait until the write under way has ended, and give the folder free; raise what went wrong, unless the run
        itself did."""
        failure = self._finish(WRITE_TIMEOUT_S if error is None else _LAST_WORDS_S)
        self._lock.close()
        if failure is not None and error is None:
            raise failure
        if failure is not None:
            logger.error("%s", failure)

    def _settle(self, *, wait: bool) -> None:
        """Take note of a write that has ended on every rank, or wait for it (collective)."""
        if self._write is None:
            return
        (has_ended,) = all_reduce_numbers([float(wait or self._write.has_ended)], dist.ReduceOp.MIN)
        if has_ended:
            raise_on_every_rank(self._finish(WRITE_TIMEOUT_S))

    def _finish(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the write under way, tell the rollout engine what is final now, or return what went wrong."""
        write, self._write = self._write, None
        if write is None:
            return None
        error = write.end(timeout_s)
        if error is None:
            self._note(write.snapshot.facts)
        return error

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Tell the rollout engine of a published checkpoint."""
        if self._rollout is not None and _rank() == 0:
            self._rollout.note_checkpoint(facts["step"], facts["rollout"]["ledger_position"])

    def _snapshot(self, step: int) -> Snapshot:
        """Copy everything to memory that the next step changes."""
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
                f"{path} must have format {_FORMAT}: got {facts.get('format')}. Go on with the AReaLite that wrote it."
            )
        shards = self._engine.state_dict()
        try:
            state_dict_loader.load(shards, checkpoint_id=path, process_group=self._group)
        except CheckpointException as failed:
            raise CheckpointError(
                f"{path} must fit the model: got {cause_of(failed)}. Go on with the configuration of the run."
            ) from failed
        self._engine.load_state_dict(shards)
        for name, part in self._parts.items():
            part.load_state_dict(facts[name])
        if self._rollout is not None:
            self._rollout.load_state_dict(facts["rollout"] if _rank() == 0 else {})
        self._note(facts)  # who published it may have died before
        self._restore_rng(path, facts)
        return int(facts["step"])

    def _restore_rng(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Go on with the generators of this rank; a rank that is new gets its own, by seed, rank and step."""
        rank = dist.get_rank()
        if rank < facts["world_size"]:
            set_rng_state(json.loads((path / rng_name(rank)).read_bytes()))
        else:
            seed_everything(random.Random(f"{self._engine.config.seed}-{rank}-{facts['step']}").getrandbits(63))


def _choose(folder: Path, mode: str) -> Path | None:
    """Return the newest checkpoint that is whole if this run is one that goes on."""
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
    """Remove what an earlier run did with its prompts and could go on from; `StatsLogger` removes what it told."""
    rows, ledger = read_jsonl(run.metrics), list(run.path.glob(f"{run.ledger.name}*"))
    if rows or ledger or run.recover.exists():
        num_steps = summarize(rows, max_head_offpolicyness=None)["steps"]
        print(f"replacing the run of {num_steps} steps in {run.path}", flush=True)
    checkpoint.remove(run.recover)  # first and at once: a checkpoint is worth nothing without its ledger
    for path in ledger:
        path.unlink()
    shutil.rmtree(run.rollouts, ignore_errors=True)


def _remove_undone(folder: Path, step: int) -> None:
    """Remove what was saved after `step`, which a run that goes on from there makes anew, and unfinished folders."""
    for later, path in checkpoint.checkpoints(folder):
        if later > step:
            checkpoint.remove(path)
    for path in folder.glob(".step_*"):
        shutil.rmtree(path)


def _rank() -> int:
    """Return the rank, also before torch.distributed is initialised."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

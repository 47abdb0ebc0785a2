"""Writes a checkpoint off the critical path, in a thread of every rank.

Invariant: a checkpoint is published only if every rank has written its part; a failure anywhere fails every rank. DCP's
own `async_save` covers the shards alone: hashing, fsync and publication would then block the loop.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from arealite.api.errors import CheckpointError
from arealite.api.run_folder import RunFolder
from arealite.trainer import checkpoint
from arealite.utils.distributed import agreed
from arealite.utils.files import explain, read_jsonl
from arealite.utils.heartbeat import waiting

FACTS = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint, in memory."""

    facts: dict[str, Any]
    shards: dict[str, Any]
    rng: dict[str, Any]


class Write:
    """A checkpoint that is being written; the threads agree after each phase, over a group that nothing else uses."""

    def __init__(
        self, folder: Path, step: int, snapshot: Snapshot, *, group: dist.ProcessGroup, keep_last: int
    ) -> None:
        self.step = step
        self.snapshot = snapshot
        self.error: CheckpointError | None = None
        self._path = folder / f"step_{step}"
        self._unfinished = folder / f".step_{step}.unfinished"
        self._group = group
        self._keep_last = keep_last
        self._thread = threading.Thread(target=self._run, name="arealite-checkpoint", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> CheckpointError | None:
        """Wait for the thread and return its error."""
        with waiting(f"{self._path.name} to be written to {self._path.parent}", on="disk"):
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return CheckpointError(
                f"{self._path} must be written within {timeout_s:g} s: it was not. Look at the disk and at other ranks."
            )
        return self.error

    def _run(self) -> None:
        try:
            agreed(self._prepare, self._group)
            files = agreed(self._write_files, self._group)
            entries = [files] * dist.get_world_size(self._group)
            dist.all_gather_object(entries, files, group=self._group)
            whole = {name: entry for part in entries for name, entry in part.items()}
            agreed(lambda: self._publish(whole), self._group)
        except Exception as error:
            self.error = CheckpointError(explain(error, self._path))
            self.error.__cause__ = error

    def _prepare(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)

    def _write_files(self) -> dict[str, checkpoint.Entry]:
        """Write this rank's files and return their entries of the manifest."""
        folder, rank = self._unfinished, dist.get_rank()
        try:
            state_dict_saver.save(self.snapshot.shards, checkpoint_id=folder, process_group=self._group)
        except CheckpointException as failed:
            raise cause_of(failed) from None
        texts = {rng_name(rank): self.snapshot.rng} | ({FACTS: self.snapshot.facts} if rank == 0 else {})
        for name, content in texts.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        shards = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        return checkpoint.entries_of(folder, [*texts, *shards, *([".metadata"] if rank == 0 else [])])

    def _publish(self, files: Mapping[str, checkpoint.Entry]) -> None:
        if dist.get_rank() == 0:
            folder = self._path.parent
            checkpoint.seal(self._unfinished, files)
            checkpoint.publish(self._unfinished, self._path)
            scores = _scores(
                read_jsonl(RunFolder(folder.parent).metrics), [step for step, _ in checkpoint.checkpoints(folder)]
            )
            checkpoint.prune(folder, keep_last=self._keep_last, scores=scores)


def on_cpu(state: Any) -> Any:
    """Copy the tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return [on_cpu(value) for value in state] if isinstance(state, list) else state


def cause_of(failed: CheckpointException) -> Exception:
    """Return the error of the first rank that failed."""
    cause = failed.failures[min(failed.failures)][0]
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))


def rng_name(rank: int) -> str:
    """Return the file of a rank's random generators."""
    return f"rng_{rank}.json"


def _scores(rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> dict[int, float]:
    """Return the score of the model after each step: accuracy, or minus the loss, of the last evaluation.

    An evaluation at the top of step N + 1 measures the weights after step N.
    """
    scores = {}
    for step in steps:
        for row in rows:
            value = row.get("eval/accuracy", -row["eval/loss"] if row.get("eval/loss") is not None else None)
            if value is not None and row["step"] <= step + 1:
                scores[step] = value
    return scores

"""Checkpoints of an engine, readable on any number of ranks, and in-memory snapshots of single ranks.

Both contain everything that later updates depend on: shards, schedule, version, and each rank's random generators.
"""

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map, tree_map_only

from arealite.api.errors import CheckpointError
from arealite.api.io_struct import WeightSharing
from arealite.engine.optimizer import local_part
from arealite.utils import distributed
from arealite.utils.files import FileEntry, file_entries
from arealite.utils.seeding import rng_state, seed_everything, set_rng_state

WRITE_TIMEOUT_S = 1800.0  # of one checkpoint
_RNG = "rng_{}.json"  # state of the random generators, by rank


class CheckpointedEngine(Stateful):
    """Saves and restores the state of an engine. Every method is collective; arguments and results are plain values."""

    num_changes: int  # number of changes of the weights
    _has_trained: bool
    _rng: dict[str, Any]
    _kept: tuple[dict[str, Any], dict[str, Any]]  # a copy of the state, and the random generators
    _state_group: dist.ProcessGroup | None = None  # reserved for the thread that writes checkpoints
    _shares: WeightSharing | None

    def begin_change(self) -> None:
        """Stop a server that samples from these weights, and count the change."""
        self.num_changes += 1
        if self._shares is not None:
            self._shares.release()

    def _join_state_group(self) -> None:
        self._state_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_TIMEOUT_S))

    def keep_rng(self) -> None:
        """Keep the states of the random generators for the next `keep_state`."""
        self._rng = rng_state()

    def keep_state(self) -> None:
        """Copy the shards to host memory for the next `write_state`."""
        copied = tree_map_only(torch.Tensor, lambda shard: shard.detach().to("cpu", copy=True), self.state_dict())
        self._kept = copied, self._rng

    def write_state(self, folder: str) -> dict[str, FileEntry]:
        """Write and release the kept state, from a thread of every rank in parallel to later updates (collective).

        Returns the files of all ranks by name once they are on disk. A failure raises on every rank.
        """
        state, rng = self._kept
        del self._kept
        files = distributed.agreed(lambda: self._write_files(Path(folder), state, rng), self._state_group)
        parts = distributed.of_all_ranks(files, self._state_group)
        return {name: entry for part in parts for name, entry in part.items()}

    def _write_files(self, folder: Path, state: dict[str, Any], rng: dict[str, Any]) -> dict[str, FileEntry]:
        """Write this rank's files and return their entries of the manifest."""
        rank, state["num_ranks"] = dist.get_rank(), dist.get_world_size()
        try:
            state_dict_saver.save(state, checkpoint_id=folder, process_group=self._state_group)
        except CheckpointException as failed:
            raise _cause_of(failed) from None
        name = _RNG.format(rank)
        (folder / name).write_text(json.dumps(rng), encoding="utf-8")
        shards = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        return file_entries(folder, [name, *shards, *([".metadata"] if rank == 0 else [])])

    def note_checkpoint(self) -> None:
        """Called once the checkpoint is published; only the master's stub uses it."""

    def read_state(self, folder: str) -> None:
        """Restore a state that any number of ranks wrote (collective); an additional rank seeds its generators."""
        self.begin_change()
        state = self.state_dict() | {"num_ranks": 0}
        try:
            state_dict_loader.load(state, checkpoint_id=folder, process_group=self._state_group)
        except CheckpointException as failed:
            raise CheckpointError(
                f"{folder} must fit the model: got {_cause_of(failed)}. Use the configuration of the run."
            ) from failed
        self.load_state_dict(state)
        rank = dist.get_rank()
        if rank < state["num_ranks"]:
            set_rng_state(json.loads(Path(folder, _RNG.format(rank)).read_bytes()))
        else:
            text = Path(folder, _RNG.format(0)).read_text(encoding="utf-8")
            seed_everything(random.Random(f"{rank} {text}").getrandbits(63))

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's part of the state for `restore`; it can be pickled, with bytes instead of tensors."""
        state = tree_map_only(torch.Tensor, _bytes, self.state_dict())
        counts = {"num_changes": self.num_changes, "has_trained": self._has_trained}
        return {"rank": _rank(), "state": state, "rng": rng_state(), **counts}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot bit for bit, under the same config; CheckpointError if another rank took it."""
        if snapshot["rank"] != _rank():
            raise CheckpointError(
                f"a snapshot for rank {_rank()} must be its own: got one of rank {snapshot['rank']}. Let each rank "
                "restore what it took, or read a checkpoint, which fits any number of ranks."
            )
        self.begin_change()
        self.load_state_dict(tree_map(_overwritten, self.state_dict(), snapshot["state"]))
        set_rng_state(snapshot["rng"])
        self.num_changes, self._has_trained = snapshot["num_changes"], snapshot["has_trained"]


def _rank() -> str:
    return f"{dist.get_rank()} of {dist.get_world_size()}"


def _bytes(shard: torch.Tensor) -> Any:
    """Copy the bytes of a tensor of any dtype (NumPy lacks some) to host memory."""
    return local_part(shard.detach()).to("cpu", copy=True).reshape(-1).view(torch.uint8).numpy()


@torch.no_grad()
def _overwritten(ours: Any, kept: Any) -> Any:
    """Return the kept value; bytes are copied into our tensor (`kept` may be read-only, which torch refuses)."""
    if not isinstance(ours, torch.Tensor):
        return kept
    shard = local_part(ours)
    shard.copy_(torch.from_numpy(kept.copy()).view(shard.dtype).view(shard.shape))
    return ours


def _cause_of(failed: CheckpointException) -> Exception:
    """Return the error of the lowest rank that failed."""
    cause = failed.failures[min(failed.failures)][0]
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))

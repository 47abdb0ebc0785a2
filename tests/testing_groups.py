"""Engines of a group's tests, which lie in a module that workers can import: state is a number, faults are planted."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.utils.distributed import all_reduce, join_default_group, leave_default_group

WIDE = 1 << 18
"""Numbers of a row, so that a piece is no part of a message: it lies on the node of the worker that made it."""


class Unreadable:
    """Something that can be pickled, and be read nowhere."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Tally:
    """Every rank has a number, which depends on all that it was told, on the other rank and on chance."""

    def __init__(self, folder: Path, *, is_trained: bool = True) -> None:
        self._folder, self._number = folder, 0.0
        if is_trained:
            self.optimizer = "a role that is trained has one"

    def initialize(self) -> None:
        torch.manual_seed(0)
        join_default_group(60.0)

    def destroy(self) -> None:
        leave_default_group()

    def add(self, amount: float, *, fault: str = "", times: int = 1) -> float:
        """Add to the number; `fault` befalls rank 1 once or more often, when half of the work is done."""
        self._number += amount * float(torch.rand(()))
        if fault and dist.get_rank() == 1 and self._count(fault) < times:
            strike(fault)
        self._number = float(all_reduce(torch.tensor(self._number, dtype=torch.float64)))
        return self._number

    def widen(self, batch: TensorDict, *, factor: float) -> torch.Tensor:
        """Return a wide row for every row, and note how often."""
        self._count("widened")
        return batch["input_ids"][:, :1] * factor * torch.ones(WIDE)

    def double(self, batch: TensorDict) -> list[int]:
        """Double the ids, and return the first one of each row."""
        batch["doubled"] = 2 * batch["input_ids"]
        return list(batch["input_ids"][:, 0].tolist())

    def total(self, batch: TensorDict) -> dict[str, float]:
        return {"total": float(all_reduce(batch["wide"].double().sum()))}

    def pid(self) -> int:
        return os.getpid()

    def snapshot(self) -> dict[str, Any]:
        return {"number": self._number, "rng": torch.get_rng_state().numpy()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._number = snapshot["number"]
        torch.set_rng_state(torch.from_numpy(snapshot["rng"].copy()))

    def write_state(self, folder: str) -> dict[str, Any]:
        """Write no files."""
        return {}

    def _count(self, what: str) -> int:
        """Return how often this was counted before, by any worker."""
        number = len(list(self._folder.glob(f"{what}-*")))
        (self._folder / f"{what}-{number}").touch(exist_ok=False)
        return number


def strike(fault: str) -> None:
    """Befall this process."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hangs":
        time.sleep(600)
    raise ValueError(f"a rank {fault}")

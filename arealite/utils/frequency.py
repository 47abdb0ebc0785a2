"""Periodic actions: due after some epochs, steps or seconds since the last time, whichever comes first."""

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist

from arealite.utils.distributed import from_rank_0


class Triggers(Protocol):
    """A config block with a frequency."""

    freq_epochs: int | None
    freq_steps: int | None
    freq_secs: float | None


class Frequency:
    """Counts calls of `check`, one per training step; all ranks get the same result."""

    def __init__(self, config: Triggers, steps_per_epoch: int, *, is_first_due: bool = False) -> None:
        """Without a trigger nothing is ever due."""
        epoch_steps = None if config.freq_epochs is None else config.freq_epochs * steps_per_epoch
        limits = [limit for limit in (config.freq_steps, epoch_steps) if limit is not None]
        self._limit_steps: float = min(limits, default=math.inf)
        self._limit_s = config.freq_secs
        self._is_first_due = is_first_due and (bool(limits) or self._limit_s is not None)
        self._restart()

    def check(self, *, force: bool = False) -> bool:
        """Count one step and return True if the action is due or forced; then restart the count (collective)."""
        self._num_steps += 1
        is_due = force or self._is_first_due or self._num_steps >= self._limit_steps
        if self._limit_s is not None:
            is_due = is_due or time.monotonic() - self._began >= self._limit_s
            is_due = from_rank_0(is_due) if dist.is_initialized() else is_due
        if is_due:
            self._restart()
            self._is_first_due = False
        return is_due

    def state_dict(self) -> dict[str, Any]:
        elapsed_s = time.monotonic() - self._began
        return {"num_steps": self._num_steps, "elapsed_s": elapsed_s, "is_first_due": self._is_first_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; limits come from the config."""
        self._num_steps, self._is_first_due = state["num_steps"], state["is_first_due"]
        self._began = time.monotonic() - state["elapsed_s"]

    def _restart(self) -> None:
        self._num_steps = 0
        self._began = time.monotonic()

"""Bounds staleness: when an episode may start, and when a batch may be taken.

Everything counts episodes (a prompt with its samples) by *head version*: the trainer's version when the attempt began.
With `eta = max_head_offpolicyness`, an episode of head `h` may be consumed up to version `h + eta`, and every version
consumes one batch. Two rules follow:

- admission: by version `v` at most `(eta + v + 1) * batch_size` episodes were ever accepted or are under way;
- waiting (earliest deadline first): the batch taken at version `v` must leave, for every head `h`, at most
  `(h + eta - v) * batch_size` unconsumed episodes with a head <= `h`: what later batches can still take in time.
  Waiting only for running episodes with `h <= v - eta` is not enough: too many may become overdue at once.

Invariant: a batch of the oldest finished episodes, taken when both rules hold, has a staleness <= `eta`; no token is
older than its episode's head (`trajectory.py`). Other policies for *overdue* episodes: `drop` rejects them, which keeps
the bound too; `train` trains on them, without any bound.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class StalenessAccount:
    """Counts the episodes of a run by head version: running, ready (finished, not yet consumed) and consumed."""

    batch_size: int
    max_head_offpolicyness: int
    max_concurrent: int
    version: int = 0
    overdue: Literal["wait", "drop", "train"] = "wait"
    running: Counter[int] = field(default_factory=Counter)
    ready: Counter[int] = field(default_factory=Counter)
    consumed: int = 0  # episodes consumed by the run, counting those before a recovery

    def __post_init__(self) -> None:
        self.set_version(self.version)

    def set_version(self, version: int) -> None:
        """Set the trainer's version. Each earlier version counts as one consumed batch."""
        self.version = version
        self.consumed = max(self.consumed, version * self.batch_size)

    def room(self) -> int:
        """Return how many more episodes the bound admits; negative when too many are under way."""
        admitted = (self.max_head_offpolicyness + self.version + 1) * self.batch_size
        return admitted - self.consumed - self.ready.total() - self.running.total()

    def capacity(self) -> int:
        """Return how many episodes may start now; 0 or less is none."""
        return min(self.max_concurrent - self.running.total(), self.room())

    def is_overdue(self, head_version: int) -> bool:
        """Return whether consuming an episode of this head now would break the bound."""
        return self.overdue != "train" and head_version < self.version - self.max_head_offpolicyness

    def can_take(self, count: int) -> bool:
        """Return whether the `count` oldest ready episodes may be consumed, if each version consumes `count`."""
        if self.overdue != "wait":
            return sum(num for head, num in self.ready.items() if not self.is_overdue(head)) >= count
        unconsumed = finished = 0
        for head_version in sorted(self.ready.keys() | self.running.keys()):
            unconsumed += self.ready[head_version] + self.running[head_version]
            finished += self.ready[head_version]
            later = max(0, head_version + self.max_head_offpolicyness - self.version) * count
            if finished < min(count, unconsumed - later):
                return False
        return finished >= count

    def move(self, head_version: int, before: str, after: str) -> None:
        """Count an episode that goes from one state of the ledger to another."""
        counts = {"running": self.running, "accepted": self.ready}
        if before in counts:
            heads = counts[before]
            assert heads[head_version] > 0, f"no {before} episode of head version {head_version} in {dict(heads)}"
            heads[head_version] -= 1
            if not heads[head_version]:
                del heads[head_version]
        if after in counts:
            counts[after][head_version] += 1
        self.consumed += after == "trained"

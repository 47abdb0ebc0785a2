"""Garbage collection at quiet moments.

Thousands of episodes in flight are millions of live objects. Python's collector walks over all of them whenever their
number has grown by a quarter, and meanwhile no thread runs: it took most of the time of a process with 4,096 episodes,
in pauses of more than a second. Here it looks by itself only at what is young; `collect` looks at everything, called
when nothing waits. Nearly all memory is freed by reference counts anyway.
"""

from __future__ import annotations

import gc
import time

_YOUNG = 50_000
"""Allocations between two looks at what is young; a few milliseconds each."""
_PERIOD_S = 60.0


class QuietCollector:
    """Takes the collection of old objects into its own hands, in the whole process."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # modules live as long as the process
        gc.set_threshold(_YOUNG, 20, 10**6)
        self._collected_at = time.monotonic()

    def collect(self) -> None:
        """Look at everything, unless that was done a minute ago."""
        if time.monotonic() - self._collected_at > _PERIOD_S:
            gc.collect()
            self._collected_at = time.monotonic()

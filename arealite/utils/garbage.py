"""Garbage collection at quiet moments: with 4,096 episodes in flight it took most of a process's time."""

import atexit
import gc
import time

_YOUNG = 50_000  # allocations between two collections of young objects, which take a few milliseconds each
_PERIOD_S = 60.0


def skip_last_collection() -> None:
    """End this process without looking for garbage among its modules, a fifth of the CPU time of a short one; for
    programs without code of the user, whose objects in cycles would not be finalized."""
    atexit.register(gc.freeze)


class QuietCollector:
    """Replaces automatic collections of old objects in this process; young ones are collected as before."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # modules live as long as the process
        gc.set_threshold(_YOUNG, 20, 10**6)
        self._collected_at = time.monotonic()

    def collect(self) -> None:
        """Collect everything, at most once a minute."""
        if time.monotonic() - self._collected_at > _PERIOD_S:
            gc.collect()
            self._collected_at = time.monotonic()

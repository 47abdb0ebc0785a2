"""A lock that one process holds on a file, and that the kernel gives free however that process ends.

The file is never removed: whoever opened it just before would lock a file that nobody else can see any more.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_AGAIN_S = 0.05


@contextmanager
def file_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a folder; TimeoutError names the holder if it is not free within `timeout_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + timeout_s
        while not _is_locked_by_us(file.fileno()):
            if time.monotonic() > deadline:
                file.seek(0)
                raise TimeoutError(
                    f"{path.parent} must belong to one run at a time: got process {file.read().strip() or 'unknown'}, "
                    f"which still holds it after {timeout_s:g} s. Stop that run, or choose another trial_name."
                )
            time.sleep(_LOOK_AGAIN_S)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _is_locked_by_us(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

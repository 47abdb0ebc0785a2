"""A lock that one process holds on a folder, named when another wants it. The kernel frees it when its holder ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def file_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a folder; TimeoutError names the holder if it is not free within `timeout_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without flock the library would fall back to a file whose existence is the lock, which outlives a killed holder.
    lock = FileLock(path, timeout=timeout_s, fallback_to_soft=False, on_acquired=_write_pid)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "unknown"
        raise TimeoutError(
            f"{path.parent} must belong to one run at a time: got process {holder}, which still holds it after "
            f"{timeout_s:g} s. Stop that run, or choose another trial_name."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _write_pid(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

"""Failed writes that say which file, why, and how much space its disk has left."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def writing(path: str | Path, *others: type[Exception]) -> Iterator[None]:
    """Turn an OSError, or one of the `others`, of the block, which writes `path`, into one whose text explains it."""
    errors: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except errors as error:
        raise OSError(explain(error, path)) from error


def explain(error: BaseException, path: str | Path) -> str:
    """Say what must be writable, what came, the free space there, and what to do."""
    return (
        f"{path} must be writable: got {type(error).__name__}: {error}, with {free_space(path)}. "
        "Make room there, or set cluster.fileroot to another disk."
    )


def free_space(path: str | Path) -> str:
    """Say how much of the disk under a path, which need not exist, is free."""
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    usage, nodes = shutil.disk_usage(folder), os.statvfs(folder)
    text = f"{_size(usage.free)} of {_size(usage.total)} free in {folder}"
    return text if nodes.f_favail or not nodes.f_files else f"{text} and no inode left"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"

"""Atomic writes, errors that name the file and the disk, and locks that name their holder."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

_SHOWN_CHARS = 300


class FileError(ValueError):
    """A file that can't be read as its format; the message names it."""


class FileEntry(TypedDict):
    """The entry of a file in a manifest."""

    bytes: int
    sha256: str


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o666, is_durable: bool = False) -> None:
    """Write a file that readers see whole or not at all, with `is_durable` also after a power failure.

    The umask applies to `mode`.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with writing(path):
        unfinished.unlink(missing_ok=True)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)


def fresh_folder(path: Path) -> None:
    """Make an empty folder; what an interrupted write left there is removed."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def publish_folder(unfinished: Path, path: Path) -> None:
    """Move a finished folder to its final path, replacing an existing one."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_entry(path: Path) -> FileEntry:
    """Read a file and return its size and SHA-256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Sync files of a folder to the disk and return their entries of a manifest."""
    paths = [folder / name for name in names]
    for path in (*paths, folder):
        sync(path)
    return {path.name: file_entry(path) for path in paths}


def aside(path: Path, why: str) -> Path:
    """Return an unused path beside `path`, to which its present content can be moved."""
    path = path.resolve()
    return path.with_name(f"{path.name}.{why}-{datetime.now():%Y%m%d-%H%M%S-%f}")


def empty_folder(folder: Path, *, keep: Iterable[str]) -> None:
    """Move the contents of a folder, except the names or patterns `keep`, to a new folder beside it; print where."""
    if paths := [path for path in folder.iterdir() if not any(path.match(name) for name in keep)]:
        moved = aside(folder, "replaced")
        with writing(moved):
            moved.mkdir()
            for path in sorted(paths, reverse=True):
                path.rename(moved / path.name)
        print(f"the run that was in {folder} is now in {moved}", flush=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none without a file. A last line that a crash cut off is skipped."""
    return list(rows_of(path))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what `read_jsonl` returns, of which a long run need not hold all at once."""
    if path.exists():
        with reading(path), path.open(encoding="utf-8") as lines:
            yield from (require_object(json.loads(line)) for line in lines if line.endswith("\n"))


def keep_rows(path: Path, key: str, *, before: int) -> None:
    """Rewrite a file of JSON lines: keep rows whose number `key` is below `before`."""
    with reading(path):
        kept = [row for row in read_jsonl(path) if row[key] < before]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def require_object(value: Any) -> dict[str, Any]:
    """Return parsed JSON if it is an object, else raise TypeError."""
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} in place of an object")
    return value


@contextlib.contextmanager
def reading(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Re-raise the errors of a block that parses a file (also `others`) as a FileError that names the file.

    A path that is not a regular file is refused first: reading it could block forever.
    """
    if path.exists() and not path.is_file():
        raise FileError(f"{path} must be a file: got something else. Remove it, or restore the file.")
    errors = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
    expected: tuple[type[Exception], ...] = (*errors, *others)
    try:
        yield
    except FileError:
        raise
    except expected as error:
        cause = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARS]}"
        raise FileError(f"{path} must be as its writer left it: got {cause}. Restore it, or correct it.") from error


@contextlib.contextmanager
def writing(path: str | Path, *others: type[Exception]) -> Iterator[None]:
    """Re-raise an OSError (also `others`) of the block with the path, the free space and advice."""
    errors: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except errors as error:
        raise OSError(explain(error, path)) from error


def explain(error: BaseException, path: str | Path) -> str:
    """Return the message for an error of writing `path`, with the free space there."""
    return (
        f"{path} must be writable: got {type(error).__name__}: {error}, with {free_space(path)}. "
        "Make room there, or set cluster.fileroot to another disk."
    )


def free_space(path: str | Path) -> str:
    """Describe the free space of the disk under a path, which need not exist."""
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return f"{_size(usage.free)} of {_size(usage.total)} free in {folder}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


@contextlib.contextmanager
def file_lock(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a folder, which the kernel frees when the holder ends.

    Raises TimeoutError with the holder after `timeout_s` seconds, OSError on a file system without locks.
    """
    from filelock import FileLock, Timeout  # an interpreter of servers may lack it

    # Without flock the library would fall back to a file whose existence is the lock, which outlives a killed holder.
    lock = FileLock(path, timeout=timeout_s, fallback_to_soft=False, on_acquired=_write_holder)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "unknown"
        raise TimeoutError(
            f"{path.parent} must belong to one run at a time: got process {holder}, which still holds it after "
            f"{timeout_s:g} s. Stop that run, or choose another trial_name."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise OSError(explain(error, path)) from error
        raise OSError(
            f"{path.parent} must be on a file system with locks: got {error}. Have it mounted with them (Lustre: "
            "-o flock), or set cluster.fileroot to another one."
        ) from error
    try:
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return True if a lock of `file_lock` is held, as far as this node can see."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # freed at once; `file_lock` retries
        except BlockingIOError:
            return True
    return False


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}\n".encode(), 0)

"""Folders of recovery checkpoints: sealed by a manifest, published atomically, verified, pruned.

A folder `step_<N>` appears by one rename, once all of it is on disk. Its `manifest.json` has the size and SHA-256 of
every other file and of its own contents, so it detects missing, truncated and changed files.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from arealite.api.errors import CheckpointError
from arealite.api.run_folder import RunFolder, numbered
from arealite.utils.files import FileEntry, file_entry, publish_folder, sync

T = TypeVar("T")
logger = logging.getLogger("arealite.recover")

MANIFEST = "manifest.json"
RETRIES_S = (1.0, 5.0, 15.0)  # pauses between attempts to read


def publish(unfinished: Path, path: Path, files: Mapping[str, FileEntry]) -> None:
    """Seal a folder whose files are on disk, and rename it to `path`, replacing an existing folder."""
    (unfinished / MANIFEST).write_bytes(_render(files))
    sync(unfinished / MANIFEST)
    sync(unfinished)
    publish_folder(unfinished, path)
    sync(path.parent)


def find_damage(folder: Path) -> str | None:
    """Return the damage of a checkpoint, None if it is complete; CheckpointError if it can't be read."""
    try:
        if (folder / MANIFEST).is_fifo():  # reading it would block
            return f"{MANIFEST} is no file"
        raw = _read(folder / MANIFEST, Path.read_bytes)
        files: dict[str, FileEntry] = json.loads(raw)["files"]
        if raw != _render(files):
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{MANIFEST} is cut off or was changed"
    with ThreadPoolExecutor() as threads:
        damages = threads.map(lambda item: _file_damage(folder, *item), files.items())
        return next(filter(None, damages), None)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the published checkpoints with their steps, newest first; none without a folder."""
    return list(reversed(numbered(folder, "step_").items()))


def config_of_step(run: RunFolder, step: int) -> Path:
    """Return the config file of a step: `config.yaml`, or the file of an earlier process.

    `config_until_<S>.yaml` is the config of the steps before S, if the run resumed at S with another config.
    """
    earlier = numbered(run.path, "config_until_", ".yaml")
    return next((path for end, path in earlier.items() if end > step), run.config)


def prune(folder: Path, *, keep_last: int, scores: Mapping[int, float]) -> None:
    """Remove all but the newest checkpoints and the one with the highest score, the oldest among equal scores."""
    known = checkpoints(folder)
    best = max((step for step, _ in known if step in scores), key=lambda step: (scores[step], -step), default=None)
    kept = {step for step, _ in known[:keep_last]} | {best}
    for step, path in known:
        if step not in kept:
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder, or finish an interrupted removal; a partly removed folder never has its final name."""
    unfinished = path.with_name(f".{path.name}.removed")
    shutil.rmtree(unfinished, ignore_errors=True)
    if path.exists():
        path.rename(unfinished)
        shutil.rmtree(unfinished)


def _file_damage(folder: Path, name: str, expected: FileEntry) -> str | None:
    path = folder / name
    try:
        size = _read(path, Path.stat).st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        return None if _read(path, file_entry) == expected else f"{name} was changed"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"


def _read(path: Path, read: Callable[[Path], T]) -> T:
    """Return `read(path)`, with retries after transient errors of network disks."""
    for pause_s in RETRIES_S:
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as failed:
            error = failed
            logger.warning("%s could not be read: %s", path, error)
            time.sleep(pause_s)
    raise CheckpointError(
        f"{path} must be readable: got {error}. Look at the disk; to use the checkpoint before, move this one away."
    ) from error


def _render(files: Mapping[str, FileEntry]) -> bytes:
    """Return the canonical bytes of a manifest, in which any changed byte is detected."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, sort_keys=True, indent=1).encode()

"""Folders of recovery checkpoints: sealed by a manifest, published atomically, verified, pruned.

A folder `step_<N>` appears by one rename, once all of it is on disk. Its `manifest.json` has the size and SHA-256 of
every other file and of its own contents, so it detects missing, truncated and changed files.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arealite.api.errors import CheckpointError
from arealite.api.run_folder import RunFolder, numbered
from arealite.utils.files import FileEntry, file_entry, publish_folder, sync

MANIFEST = "manifest.json"


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
        raw = (folder / MANIFEST).read_bytes()
        files: dict[str, FileEntry] = json.loads(raw)["files"]
        if raw != _render(files):
            raise ValueError("its checksum differs")
        with ThreadPoolExecutor() as threads:
            damages = threads.map(lambda item: _file_damage(folder, *item), files.items())
            return next(filter(None, damages), None)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{MANIFEST} is cut off or was changed"
    except OSError as error:  # no damage: a network disk may be away
        raise CheckpointError(
            f"{folder} must be readable: got {error}. Look at the disk; to use the checkpoint before, move this one "
            "away."
        ) from error


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
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        return None if file_entry(path) == expected else f"{name} was changed"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"


def _render(files: Mapping[str, FileEntry]) -> bytes:
    """Return the canonical bytes of a manifest, in which any changed byte is detected."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, sort_keys=True, indent=1).encode()

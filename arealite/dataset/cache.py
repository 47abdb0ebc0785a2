"""What is made of rows once, kept in the cache of `datasets`, and read by everybody else.

Invariant: a folder of the cache has its final name only when it is whole. One process of those that share the cache
makes it; the others wait for as long as it gets on.
"""

import functools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

import datasets

from arealite.chat import template
from arealite.dataset.rows import CHUNK, Row, Rows, digest_of
from arealite.utils import heartbeat
from arealite.utils.files import file_lock, free_space, fresh_folder, publish_folder, sync

logger = logging.getLogger("arealite.dataset")
T = TypeVar("T")
PATIENCE_S = 600.0  # how long others wait for a maker that gets no further
_LOOK_S = 1.0
_LOG_PERIOD_S = 30.0
_PROGRESS = "progress"  # a file that the maker touches


def made_once(key: str | None, make: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Load a folder that `make` fills once for all processes; without a key, for this one.

    TimeoutError if another process holds the key and makes no progress, OSError if the cache can't be written.
    """
    root = Path(datasets.config.HF_DATASETS_CACHE) / "arealite"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if key is None:  # what is mapped stays there without its name
            with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
                make(Path(name))
                return load(Path(name))
        folder = root / key
        if not folder.exists():
            with ExitStack() as stack:
                _wait_for_turn(stack, folder)
                if not folder.exists():
                    _make_whole(folder, make)
        return load(folder)
    except TimeoutError:
        raise
    except OSError as error:
        raise OSError(
            f"{root} must be a folder that can be written and locked: got {error}, with {free_space(root)}. "
            "Set HF_DATASETS_CACHE to one."
        ) from error


def _wait_for_turn(stack: ExitStack, folder: Path) -> None:
    progress, lock = _unfinished(folder) / _PROGRESS, folder.with_suffix(".lock")
    moved, seen = time.monotonic(), 0.0
    with heartbeat.waiting(f"another process to prepare the rows of {folder}", on="ranks"):
        while True:
            try:
                stack.enter_context(file_lock(lock, timeout_s=_LOOK_S))
            except TimeoutError as error:
                now = progress.stat().st_mtime if progress.exists() else 0.0
                moved, seen = (moved if now == seen else time.monotonic()), now
                if time.monotonic() - moved > PATIENCE_S:
                    holder = lock.read_text(encoding="utf-8").strip() or "unknown"
                    raise TimeoutError(
                        f"rows must be prepared without a pause of {PATIENCE_S:g} s: got process {holder}, which holds "
                        f"{lock} and gets no further. End it, and start again."
                    ) from error
            else:
                return


def _make_whole(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = _unfinished(folder)
    fresh_folder(unfinished)
    try:
        make(unfinished)
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        publish_folder(unfinished, folder)
    finally:
        rmtree(unfinished, ignore_errors=True)


def _unfinished(folder: Path) -> Path:
    return folder.with_suffix(".unfinished")


def chunks(rows: Rows, what: str, folder: Path) -> Iterator[tuple[int, list[Row]]]:
    """Yield the first index and the rows of each chunk; show progress to the user, to waiters and to the watchdog."""
    told = time.monotonic()
    with datasets.utils.tqdm(total=len(rows), desc=what, unit=" rows", disable=None, delay=2) as bar:
        for start in range(0, len(rows), CHUNK):
            chunk = rows.read(start, start + CHUNK)
            yield start, chunk
            heartbeat.tick()
            (folder / _PROGRESS).touch()
            bar.update(len(chunk))
            if bar.disable and time.monotonic() - told > _LOG_PERIOD_S:
                told = time.monotonic()
                logger.info("%s: %d of %d rows", what, start + len(chunk), len(rows))


def tokenizer_content(tokenizer: Any) -> str:
    """Return what changes when the files of a tokenizer do, or its chat template."""
    if tokenizer is None:
        return ""
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        told = f"{tokenizer.chat_template} {tokenizer.eos_token_id}"
        return digest_of(told.encode(), *(part for path in files for part in (path.name.encode(), path.read_bytes())))


@functools.cache
def code_content() -> str:
    """Return what changes when the code that makes tokens of rows does."""
    files = [*Path(__file__).parent.glob("*.py"), Path(template.__file__)]
    versions = [version(name).encode() for name in ("transformers", "tokenizers", "jinja2")]
    return digest_of(*versions, *(path.read_bytes() for path in sorted(files)))

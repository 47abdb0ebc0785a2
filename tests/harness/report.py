"""How programs of tests report: lines with the time, what is broken, and `RESULT {json}` as the last line."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testing_quickstart import write_tiny_model

_STARTED = time.monotonic()


def seconds() -> float:
    """Return the time since the program started."""
    return time.monotonic() - _STARTED


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{seconds():6.1f} s  {text}", flush=True)


def make_folder(name: str, parent: Path | None = None) -> tuple[Path, Path]:
    """Make a folder to work in, and a tiny model in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"arealite-{name}-", dir=parent))
    return folder, write_tiny_model(out=folder / "model", corpus=None, seed=1)


def conclude(broken: Sequence[str], folder: Path) -> None:
    """Print what is broken and name the folder, or remove it."""
    for text in broken:
        say(f"BROKEN {text}")
    if broken:
        say(f"see {folder}")
    else:
        shutil.rmtree(folder)


def print_result(result: dict[str, Any], *, is_broken: bool = False) -> int:
    """Print the last line and return the exit status."""
    print(f"RESULT {json.dumps(result)}", flush=True)
    return int(is_broken)


def skip(reason: str) -> int:
    """Say that a program can't run here, and return its exit status."""
    print(f"SKIPPED: {reason}")
    return print_result({"skipped": reason})

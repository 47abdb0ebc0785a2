"""Runs an experiment on this node: inference servers, the trainer's ranks, one console.

    python3 -m arealite.launcher.local ENTRY.py --config FILE.yaml [--dry-run] [key=value ...]

Nothing that was started survives. With `recover.mode` auto or fault a run that failed or stalled is started again, and
the exit status (`--help` lists them) is that of the last attempt.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from arealite.launcher.place.local import LocalPlace
from arealite.launcher.supervise import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    description = "Start inference servers and trainer on this node, as allocation_mode says."
    return run.main(argv, LocalPlace(), name="local", description=description)


def launch(entry: str | Path, argv: Sequence[str]) -> int:
    """Run `entry` with `--config FILE key=value ...` on this node and return the exit status (see `run.launch`)."""
    return run.settle(entry, argv, lambda settled: run.launch(settled, LocalPlace()))


if __name__ == "__main__":
    sys.exit(main())

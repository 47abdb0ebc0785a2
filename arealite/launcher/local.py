"""Runs an experiment on this node: inference servers, the trainer's ranks, one console.

    python3 -m arealite.launcher.local ENTRY.py --config FILE.yaml [--dry-run] [key=value ...]

Nothing that was started survives. With `recover.mode` auto or fault a run that failed or stalled is started again, and
the exit status (`--help` lists them) is that of the last attempt.
"""

import sys
from collections.abc import Sequence

from arealite.launcher.place.local import LocalPlace
from arealite.launcher.supervise import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status (see `run.launch`)."""
    description = "Start inference servers and trainer on this node, as allocation_mode says."
    return run.main(argv, LocalPlace(), name="local", description=description)


if __name__ == "__main__":
    sys.exit(main())

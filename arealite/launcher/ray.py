"""Runs an experiment on a Ray cluster: its nodes, as many as the config says, watched over from here.

    python3 -m arealite.launcher.ray ENTRY.py --config FILE.yaml [--dry-run] [key=value ...]

The cluster is that of RAY_ADDRESS, or else the one this node belongs to. Exit statuses are those of the local
launcher. When the launcher ends, whatever ends it, so do the jobs; Ray itself keeps running.
"""

import sys
from collections.abc import Sequence

from arealite.launcher.place.ray import RayPlace
from arealite.launcher.supervise import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    description = "Start inference servers and trainer on a Ray cluster, as allocation_mode says."
    return run.main(argv, RayPlace(), name="Ray", description=description)


if __name__ == "__main__":
    sys.exit(main())

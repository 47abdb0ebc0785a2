"""Runs an experiment on this node: inference servers, the trainer's ranks, one console.

    python3 -m arealite.launcher.local ENTRY.py --config FILE.yaml [--dry-run] [key=value ...]

Nothing that was started survives. With `recover.mode` auto or fault a run that failed or stalled is started again, and
the exit status (`--help` lists them) is that of the last attempt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.inference.backends import kind_of
from arealite.launcher.place.base import Place
from arealite.launcher.place.local import LocalPlace
from arealite.launcher.plan.jobs import visible_gpus
from arealite.launcher.plan.plan import Plan
from arealite.launcher.supervise import run
from arealite.launcher.supervise.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = run.parse(
        argv,
        prog="python3 -m arealite.launcher.local",
        description="Start inference servers and trainer on this node, as allocation_mode says.",
    )
    return run.dry_run(args.entry, args.argv, by="local") if args.dry_run else launch(args.entry, args.argv)


def launch(entry: str | Path, argv: Sequence[str]) -> int:
    """Run `entry` on this node (see `run.launch`)."""
    return run.launch(entry, argv, run.Backend("this node", _open_place, check))


def _open_place(config: BaseExperimentConfig, plan: Plan, supervisor: Supervisor) -> Place:
    return LocalPlace(visible_gpus())


def check(config: BaseExperimentConfig, plan: Plan) -> None:
    """Refuse what this node does not have."""
    if config.cluster.n_nodes != 1:
        raise ConfigError(
            f"cluster.n_nodes must be 1 for the local launcher: got {config.cluster.n_nodes}. Set cluster.n_nodes=1, "
            "or use arealite.launcher.ray, slurm or torchrun."
        )
    if plan.servers:
        kind_of(config).check_installed(config)
    needed = sum(len(one.devices) for one in plan.placements)
    if needed > len(visible_gpus()) and config.cluster.n_gpus_per_node > 0:
        raise ConfigError(
            f"allocation_mode must fit the GPUs: got {AllocationMode.from_str(config.allocation_mode)}, which needs "
            f"{needed}, and {len(visible_gpus())} GPUs on this node. "
            "Make it smaller, or set cluster.n_gpus_per_node=0 to run on the CPU."
        )


if __name__ == "__main__":
    sys.exit(main())

"""Runs an experiment on a Ray cluster: its nodes, as many as the config says, watched over from here.

    python3 -m arealite.launcher.ray ENTRY.py --config FILE.yaml [--dry-run] [key=value ...]

The cluster is that of RAY_ADDRESS, or else the one this node belongs to. Exit statuses are those of the local
launcher. When the launcher ends, whatever ends it, so do the jobs; Ray itself keeps running.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from arealite.api.cli_args import BaseExperimentConfig
from arealite.inference.backends import kind_of
from arealite.launcher.place.base import Place
from arealite.launcher.place.ray import RayPlace, connect, own_address
from arealite.launcher.plan.plan import Plan
from arealite.launcher.supervise import run
from arealite.launcher.supervise.supervisor import Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = run.parse(
        argv,
        prog="python3 -m arealite.launcher.ray",
        description="Start inference servers and trainer on a Ray cluster, as allocation_mode says.",
    )
    return run.dry_run(args.entry, args.argv, by="Ray") if args.dry_run else launch(args.entry, args.argv)


def launch(entry: str | Path, argv: Sequence[str]) -> int:
    """Run `entry` on the Ray cluster (see `run.launch`)."""
    return run.launch(entry, argv, run.Backend("Ray", _open_place, _check, registry_host=lambda plan: own_address()))


def _check(config: BaseExperimentConfig, plan: Plan) -> None:
    """Connect to the cluster. Whether it has room is no question of now: a slot is waited for."""
    if plan.servers:
        kind_of(config).check_installed(config)
    connect()


def _open_place(config: BaseExperimentConfig, plan: Plan, supervisor: Supervisor) -> Place:
    return RayPlace(plan, config.launcher, setup_timeout_s=run.setup_timeout_s(config), log=supervisor.log)


if __name__ == "__main__":
    sys.exit(main())

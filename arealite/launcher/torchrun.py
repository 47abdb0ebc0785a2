"""Prints the commands that run an experiment by hand: one torchrun per node of the trainer, and the servers.

    python3 -m arealite.launcher.torchrun ENTRY.py --config FILE.yaml [key=value ...]

It prints the plan of the other launchers for nodes without a scheduler. It starts nothing: torchrun watches the nodes,
and restarts the ranks when a rank fails. It writes one file, the run's secret, which the nodes must share.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from arealite.api.errors import ConfigError
from arealite.launcher.plan.jobs import trainer_threads
from arealite.launcher.plan.plan import Run, refuse_workers
from arealite.launcher.supervise.run import command, preflight
from arealite.utils.secret import SECRET_VARIABLE, ensure_secret

RENDEZVOUS_PORT = 29400
MAX_RESTARTS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands and return the exit status."""
    return command(
        argv,
        _print,
        prog="arealite.launcher.torchrun",
        description="Print the commands that start a run by hand, and write the secret that its nodes share.",
        epilog="exit status: 0 done, 2 config error",
    )


def _print(run: Run, args: argparse.Namespace) -> int:
    refuse_workers(run.plan, launcher="arealite.launcher.torchrun")
    if not args.dry_run:
        preflight(run)
        try:
            run.folder.path.mkdir(parents=True, exist_ok=True)
            ensure_secret(run.folder.path)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
    print("\n".join(command_lines(run)))
    return 0


def command_lines(run: Run) -> Iterator[str]:
    """Return the lines to paste into a shell of each node, all in the same folder of a shared file system."""
    plan = run.plan
    yield "# on every node, with the addresses by which they reach each other"
    yield "export " + " ".join(f"HOST{node}=ADDRESS" for node in range(plan.num_nodes))
    yield f"export {SECRET_VARIABLE}=$(cat {shlex.quote(str(run.folder.secret))})"
    for node in plan.used_nodes:
        yield f"# node {node}"
        for one in plan.servers:
            if one.node == node:
                variables = _variables(one.devices, run.config.launcher.inference_server_env_vars, {})
                serve = f"arealite serve --join {run.config.experiment_name}/{run.config.trial_name}"
                yield f"{variables}{serve} --host $HOST{node} {shlex.join(run.argv)} &"
        if node in plan.trainer_nodes:
            yield _trainer_command(run, node)


def _trainer_command(run: Run, node: int) -> str:
    """Return the torchrun of a node, which meets the others at the trainer's first node."""
    config, plan = run.config, run.plan
    ranks, first = plan.ranks_on(node), plan.trainer_nodes[0]
    threads = {"OMP_NUM_THREADS": str(trainer_threads(config, plan, num_ranks=len(ranks)))}
    devices = [device for one in ranks for device in one.devices]
    torchrun = f"torchrun --nnodes {len(plan.trainer_nodes)} --nproc-per-node {len(ranks)}"
    torchrun += f" --max-restarts {MAX_RESTARTS} --local-addr $HOST{node} --rdzv-backend c10d"
    # torchrun's own guess of the first node fails where a node's name resolves to its loopback.
    torchrun += f" --rdzv-endpoint $HOST{first}:{RENDEZVOUS_PORT} --rdzv-conf is_host={int(node == first)}"
    words = [str(run.entry), *run.argv]
    return f"{_variables(devices, config.launcher.trainer_env_vars, threads)}{torchrun} {shlex.join(words)}"


def _variables(devices: Sequence[int], of_user: str, ours: Mapping[str, str]) -> str:
    """Return the environment of a command; a process without GPUs must not see any."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    users = dict(pair.split("=", 1) for pair in of_user.split(",") if pair)
    return "".join(f"{name}={shlex.quote(value)} " for name, value in {**visible, **ours, **users}.items())


if __name__ == "__main__":
    sys.exit(main())

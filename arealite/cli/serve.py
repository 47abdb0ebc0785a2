"""`arealite serve`: adds an inference server to a run that is under way, or starts one for no run.

The server gets the command that the launcher would have given it, from the config of the run. This process then becomes
`arealite.launcher.serve`.
"""

import argparse
import asyncio
import os
import platform
import shlex
from pathlib import Path

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.inference.backends.program import ServerProgram
from arealite.inference.registry import RegistryClient, RegistryError, RegistryRefusedError, address_in
from arealite.launcher.plan.jobs import server_job
from arealite.launcher.plan.plan import Placement, check_model
from arealite.utils.devices import visible_gpus
from arealite.utils.files import reading
from arealite.utils.network import LOOPBACK, address_toward, host_ip
from arealite.utils.processes import REGISTRY_VARIABLE
from arealite.utils.secret import SECRET_VARIABLE, check_length, is_loopback, secret_of_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start an inference server on this node with the run's own config. It receives the run's current weights "
        "before requests; Ctrl-C or SIGTERM hands unfinished requests back. Without --join, serve a model on its own: "
        "that of --config FILE, or allocation_mode=lite.d1 actor.path=MODEL (lite, sglang or vllm)."
    )
    parser.epilog = "exit status: 0 after a signal, 2 refused, else that of the server"
    parser.add_argument("--join", metavar="EXPERIMENT/TRIAL", help="the run")
    fileroot = "cluster.fileroot of the run, as this node sees it (default runs)"
    parser.add_argument("--fileroot", metavar="FOLDER", default="runs", help=fileroot)
    parser.add_argument("--config", metavar="FILE.yaml", help="config to use where the run folder is not visible")
    host = "address by which trainers reach this node (default: detected with --join, else loopback)"
    parser.add_argument("--host", metavar="ADDRESS", help=host)
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--dry-run", action="store_true", help="print the command of the server")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change, e.g. lite.slots=8")


def run(args: argparse.Namespace) -> int:
    """Become the server, or print its command."""
    config = _joined_config(args) if args.join else _own_config(args)
    gpus = _check(config)
    secret, registry, host = secret_of_environment() or "", "", args.host or LOOPBACK
    if args.join:
        secret = secret or _kept_secret(config)
        registry = os.environ.get(REGISTRY_VARIABLE) or str(RunFolder(config).registry)
        host = _check_registry(config, registry, secret, host=args.host, may_wait=args.config is not None)
    name = f"{platform.node()}-{os.getpid()}"
    placement = Placement(name, "server", node=0, devices=tuple(range(len(gpus))), index=os.getpid())
    job = server_job(config, placement, host, gpus)
    at = job.command.index("--host")
    command = [*job.command[:at], *(["--port", str(args.port)] if args.port else []), *job.command[at:]]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    os.execve(command[0], command, {**os.environ, SECRET_VARIABLE: secret, REGISTRY_VARIABLE: registry, **job.env})


def _joined_config(args: argparse.Namespace) -> BaseExperimentConfig:
    """Return the config of the run, from its folder or, where that can't be seen, from the file it was started with."""
    experiment, _, trial = args.join.partition("/")
    if not (experiment and trial) or "/" in trial:
        raise ConfigError(f"--join must be EXPERIMENT/TRIAL: got {args.join}. Write the two names of the run.")
    if args.config:
        names = [f"experiment_name={experiment}", f"trial_name={trial}"]
        return load_run_config(["--config", args.config, *args.overrides, *names])
    fileroot = Path(args.fileroot).expanduser().absolute()
    file = fileroot / experiment / trial / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"--join must name a run that has begun to train: got {args.join}, and there is no {file}. Correct it or "
            f"--fileroot; where the folder can't be seen, give --config FILE and the secret in {SECRET_VARIABLE}."
        )
    # This node may see the run folder elsewhere than the node that wrote the config.
    return load_run_config(["--config", str(file), f"cluster.fileroot={fileroot}", *args.overrides])


def _own_config(args: argparse.Namespace) -> BaseExperimentConfig:
    """Return the config of a server for no run; without a file it uses the GPUs that are there."""
    if args.config:
        return load_run_config(["--config", args.config, *args.overrides])
    file, gpus = Path(__file__).with_name("server.yaml"), f"cluster.n_gpus_per_node={len(visible_gpus())}"
    return load_run_config(["--config", str(file), gpus, *args.overrides])


def _check(config: BaseExperimentConfig) -> list[str]:
    """Refuse what can't be served here, and return the GPUs to serve with."""
    mode = config.allocation
    if mode is None or mode.gen_dp_size == 0:
        raise ConfigError(
            f"allocation_mode must name servers: got {config.allocation_mode or 'nothing'}. "
            "Add e.g. allocation_mode=lite.d1."
        )
    check_model(config)
    program = ServerProgram(config)
    program.check_block()
    program.check_installed()
    if config.cluster.n_gpus_per_node == 0:
        return []
    gpus = visible_gpus()
    if len(gpus) < mode.gen_instance_size:
        raise ConfigError(
            f"a server of this run must have {mode.gen_instance_size} GPUs: got {len(gpus)} that this process may use. "
            "Set CUDA_VISIBLE_DEVICES, or cluster.n_gpus_per_node=0 to serve on the CPU."
        )
    return gpus[: mode.gen_instance_size]


def _kept_secret(config: BaseExperimentConfig) -> str:
    file = RunFolder(config).secret
    try:
        with reading(file):
            secret = file.read_text(encoding="utf-8").strip()
        check_length(file, secret, "It is not what the run wrote.")
        return secret
    except ValueError as error:
        raise ConfigError(
            f"the secret of the run must be known: got nothing in {SECRET_VARIABLE}, and {file} can't be read: "
            f"{error.__cause__ or error}. Join as the user who runs it, or set {SECRET_VARIABLE} to its content."
        ) from error


def _check_registry(
    config: BaseExperimentConfig, registry: str, secret: str, *, host: str | None, may_wait: bool
) -> str:
    """Refuse a server that the run can't use, and return the address by which the run reaches this node.

    Without a registry the server waits for the run to begin, if it may and sees the run's folder.
    """
    assert config.rollout is not None, "`_check` has found servers"
    if config.rollout.server_addrs:
        raise ConfigError(
            f"rollout.server_addrs must be empty for servers to join: got {','.join(config.rollout.server_addrs)}, and "
            "the run asks no others. Serve without --join at one of these addresses."
        )
    try:
        address, node = address_in(registry)
        asyncio.run(RegistryClient(address, secret).watch(timeout_s=0))
    except RegistryError as error:
        if may_wait and RunFolder(config).path.is_dir() and not isinstance(error, RegistryRefusedError):
            return host or host_ip()
        raise ConfigError(
            f"the registry of the run must be reached: {error} Join while the run lasts; where its folder can't be "
            f"seen, set {REGISTRY_VARIABLE}=HOST:PORT to what is in its registry.json."
        ) from error
    its_host = address.rpartition(":")[0]
    if is_loopback(its_host):
        if node and node != platform.node():
            raise ConfigError(
                f"the registry of the run must be reached: it listens at {address} of {node} alone. Join from there, "
                "or start the run by the launcher for Slurm or Ray, or by hand."
            )
        return host or LOOPBACK
    return host or address_toward(its_host)

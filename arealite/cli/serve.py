"""`arealite serve`: one more inference server for a run that is under way, or one for no run.

The run's own config says everything about the server, so that what joins is what the launcher would have started: the
same command, but for the address. This process then becomes `arealite.launcher.serve`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
from dataclasses import asdict
from pathlib import Path

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.inference.backends import kind_of
from arealite.launcher.plan.jobs import check_model, registry_flags, server_job, visible_gpus
from arealite.launcher.plan.plan import Placement, rollout_of
from arealite.utils.environment import SECRET_VARIABLE
from arealite.utils.name_resolve import NameResolveError, make_repository
from arealite.utils.network import LOOPBACK, address_toward, host_ip
from arealite.utils.secret import SECRET_FILE, is_loopback, secret_of_environment
from arealite.utils.server_record import ServerRecord, servers_root


def serve(args: argparse.Namespace) -> int:
    """Become the server, or print how; see `cli.main` for the arguments."""
    config = _joined_config(args) if args.join else _config(args.config, args.overrides)
    gpus = _check(config)
    secret = secret_of_environment() or ""
    host = args.host or LOOPBACK
    if args.join:
        secret = secret or _kept_secret(config)
        host = _reachable_host(args.host, _servers(config, secret))
    name = f"{platform.node()}-{os.getpid()}"
    placement = Placement(name, "server", node=0, devices=tuple(range(len(gpus))), index=os.getpid())
    job = server_job(config, placement, host, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, secret)
    at = job.command.index("--join")
    flags = [*(registry_flags(config) if args.join else []), *(["--port", str(args.port)] if args.port else [])]
    command = [*job.command[:at], *flags, *job.command[at + len(registry_flags(config)) :]]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    os.execve(command[0], command, os.environ | job.env)


def _joined_config(args: argparse.Namespace) -> BaseExperimentConfig:
    """Return the config of the run, from its folder or, where that can't be seen, from the file it was started with."""
    experiment, _, trial = args.join.partition("/")
    if not (experiment and trial) or "/" in trial:
        raise ConfigError(f"--join must be EXPERIMENT/TRIAL: got {args.join}. Write the two names of the run.")
    if args.config:
        return _config(args.config, [*args.overrides, f"experiment_name={experiment}", f"trial_name={trial}"])
    fileroot = Path(args.fileroot).expanduser().absolute()
    file = fileroot / experiment / trial / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"--join must name a run that has begun to train: got {args.join}, and there is no {file}. Correct it or "
            f"--fileroot; where the folder can't be seen, give --config FILE and the secret in {SECRET_VARIABLE}."
        )
    config = _config(str(file), args.overrides)
    if config.cluster.fileroot != str(fileroot):  # this machine sees it elsewhere
        moved = [f"cluster.fileroot={fileroot}"]
        if config.cluster.name_resolve.nfs_record_root == config.cluster.fileroot:
            moved.append(f"cluster.name_resolve.nfs_record_root={fileroot}")
        config = _config(str(file), [*moved, *args.overrides])
    return config


def _config(file: str, overrides: list[str]) -> BaseExperimentConfig:
    """Load what servers need to know, also of someone's own config class."""
    return load_run_config(["--config", file, *overrides])


def _check(config: BaseExperimentConfig) -> list[str]:
    """Refuse what can't be served here, and return the GPUs to serve with."""
    mode = AllocationMode.from_str(config.allocation_mode or "d1")
    if mode.gen_dp_size == 0:
        raise ConfigError(
            f"allocation_mode must name servers: got {config.allocation_mode or 'nothing'}. "
            "Add e.g. allocation_mode=lite.d1."
        )
    check_model(config)
    kind_of(config).check_block(config)
    kind_of(config).check_installed(config)
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
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"the secret of the run must be known: got nothing in {SECRET_VARIABLE}, and {file} can't be read: "
            f"{error.strerror}. Join as the user who runs it, or set {SECRET_VARIABLE} to what is in that file."
        ) from error


def _servers(config: BaseExperimentConfig, secret: str) -> list[ServerRecord]:
    """Return the servers that the run has, which must be of our kind."""
    rollout = rollout_of(config)
    if rollout.server_addrs:
        raise ConfigError(
            f"rollout.server_addrs must be empty for servers to join: got {','.join(rollout.server_addrs)}, and "
            "the run asks no others. Serve without --join at one of these addresses."
        )
    names = make_repository(**asdict(config.cluster.name_resolve))
    try:
        entries = names.items(servers_root(config.experiment_name, config.trial_name))
        servers = [ServerRecord.read(key, text, secret) for key, text in entries.items()]
    except NameResolveError as error:
        raise ConfigError(f"the registry of the run must be reached: got {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{SECRET_VARIABLE} or the run folder's {SECRET_FILE} must be the secret of the run: got another one, "
            f"because {error}. Set {SECRET_VARIABLE} to the run's."
        ) from error
    if others := {one.backend for one in servers} - {rollout.backend}:
        raise ConfigError(
            f"a server must be of the run's backend: got {rollout.backend}, and it has {', '.join(others)}. "
            "Leave allocation_mode as the run has it."
        )
    return servers


def _reachable_host(host: str | None, servers: list[ServerRecord]) -> str:
    """Return the address by which the trainers of a run with these servers reach this machine."""
    addresses = [one.address.rpartition(":")[0] for one in servers]
    is_all_here = bool(servers) and all(is_loopback(address) for address in addresses)
    is_all_here = is_all_here and {one.node for one in servers} == {platform.node()}
    if host is None:
        return LOOPBACK if is_all_here else address_toward(addresses[0]) if servers else host_ip()
    if is_loopback(host) and servers and not is_all_here:
        raise ConfigError(
            f"--host must be an address that the run's trainers reach: got {host}, and its servers are at "
            f"{', '.join(addresses)}. Leave --host out, or name an interface that other machines reach."
        )
    return host

"""What a run consists of: one job per inference server, and torchrun for the trainer. Pure descriptions.

Every check that can be made before a process starts is made in `check_roles` and `server_jobs`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arealite
from arealite.api.alloc_mode import AllocationMode, AllocationType
from arealite.api.cli_args import GRPOConfig, SFTConfig
from arealite.api.errors import ConfigError
from arealite.utils.environment import RESTART_VARIABLE, SERVER_ADDRS_VARIABLE
from arealite.utils.network import LOOPBACK

LITE_MODULE = "arealite.server"
_MODEL_FLAGS = {"sglang": "model_path", "vllm": "model"}
_OUR_FLAGS = {
    "sglang": {"model_path", "host", "port", "tp_size", "base_gpu_id", "weight_version"},
    "vllm": {"model", "host", "port", "tensor_parallel_size"},
}
"""Flags of the real servers that the blocks of the config must leave to us."""


@dataclass(frozen=True)
class Job:
    """One command with its whole environment."""

    name: str
    command: list[str]
    env: dict[str, str]


@dataclass(frozen=True)
class ServerJob(Job):
    """An inference server and where it will listen."""

    port: int

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def publishes_progress(self) -> bool:
        """Whether this is our own server, which tells what it does."""
        return LITE_MODULE in self.command


@dataclass(frozen=True)
class Roles:
    """How many processes of each kind a run has, and which devices they get."""

    num_servers: int
    gpus_per_server: int
    num_ranks: int
    gpus: tuple[str, ...]
    """Names of the GPUs for CUDA_VISIBLE_DEVICES, servers' first; empty on a CPU cluster."""
    foreign_servers: str
    """Addresses of servers that someone else starts and stops."""

    def server_gpus(self, index: int) -> str:
        """Return the CUDA_VISIBLE_DEVICES of a server."""
        return ",".join(self.gpus[index * self.gpus_per_server :][: self.gpus_per_server])

    @property
    def trainer_gpus(self) -> str:
        """CUDA_VISIBLE_DEVICES of the trainer."""
        return ",".join(self.gpus[self.num_servers * self.gpus_per_server :])


def check_roles(config: GRPOConfig | SFTConfig) -> Roles:
    """Work out the processes of a run and refuse what this machine or this launcher can't do."""
    if not config.allocation_mode:
        raise ConfigError(
            "allocation_mode must be given to a launcher: got nothing. "
            "Add e.g. allocation_mode=lite.d1p1t1+d1p1t1 (servers and trainers) or allocation_mode=d1 (trainers only)."
        )
    if config.cluster.n_nodes != 1:
        raise ConfigError(
            f"cluster.n_nodes must be 1 for the local launcher: got {config.cluster.n_nodes}. Set cluster.n_nodes=1."
        )
    mode = AllocationMode.from_str(config.allocation_mode)
    _check_trainers(mode)
    _check_model(config)
    foreign = foreign_servers(config)
    is_replay = isinstance(config, GRPOConfig) and bool(config.rollout.replay_from)
    starts_servers = mode.gen_dp_size > 0 and not foreign and not is_replay
    if starts_servers:
        _check_servers(config, mode)
    if isinstance(config, GRPOConfig) and mode.gen_dp_size == 0 and not foreign and not is_replay:
        raise ConfigError(
            f"allocation_mode must name servers for reinforcement learning: got {mode}. "
            f"Write e.g. lite.d1+{mode}, or give rollout.server_addrs."
        )
    num_servers = mode.gen_dp_size if starts_servers else 0
    return Roles(
        num_servers=num_servers,
        gpus_per_server=mode.gen_instance_size,
        num_ranks=1 if mode.type_ is AllocationType.DECOUPLED_EVAL else mode.train_world_size,
        gpus=_gpus(config, needed=num_servers * mode.gen_instance_size + mode.train_world_size),
        foreign_servers=foreign,
    )


def foreign_servers(config: GRPOConfig | SFTConfig) -> str:
    """Return the addresses of servers that someone else starts and stops, with commas between them."""
    if isinstance(config, GRPOConfig) and config.rollout.server_addrs:
        return ",".join(config.rollout.server_addrs)
    return os.environ.get(SERVER_ADDRS_VARIABLE, "")


def server_jobs(config: GRPOConfig | SFTConfig, roles: Roles, ports: Sequence[int]) -> list[ServerJob]:
    """Describe one server per port."""
    if not ports:
        return []
    assert isinstance(config, GRPOConfig), type(config)
    describe = {"lite": _lite_command, "sglang": _sglang_command, "vllm": _vllm_command}[config.rollout.backend]
    jobs = []
    for index, port in enumerate(ports):
        command = describe(config, roles, port=port, index=index)
        env = _environment(
            config.launcher.inference_server_env_vars,
            python=command[0],
            CUDA_VISIBLE_DEVICES=roles.server_gpus(index),
            **({"OMP_NUM_THREADS": str(config.lite.threads)} if config.rollout.backend == "lite" else {}),
        )
        jobs.append(ServerJob(f"server-{index}", command, env, port))
    return jobs


def trainer_job(
    config: GRPOConfig | SFTConfig,
    roles: Roles,
    *,
    entry: Path,
    argv: Sequence[str],
    server_addrs: str,
    master_port: int,
    scratch: Path,
    is_restart: bool,
    streams: Sequence[str],
    report: str,
) -> Job:
    """Describe torchrun, whose ranks write to `streams` and report their end to `report` (see `rank`).

    torchrun leaves its own files in `scratch`, and for ever in the system's folder if it had none.
    """
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(roles.num_ranks)]
    torchrun += ["--master-addr", LOOPBACK, "--master-port", str(master_port)]
    torchrun += ["--log-dir", str(scratch), "--no-python"]
    rank = [sys.executable, "-m", "arealite.launcher.rank", "--streams", ",".join(streams), "--report", report]
    env = _environment(
        config.launcher.trainer_env_vars,
        CUDA_VISIBLE_DEVICES=roles.trainer_gpus,
        OMP_NUM_THREADS=str(_trainer_threads(config, roles)),
        **({RESTART_VARIABLE: str(int(is_restart))} | ({SERVER_ADDRS_VARIABLE: server_addrs} if server_addrs else {})),
    )
    return Job("torchrun", [sys.executable, *torchrun, *rank, str(entry), *argv], env)


def _check_trainers(mode: AllocationMode) -> None:
    for name, size in {"p": mode.train_pp_size, "t": mode.train_tp_size}.items():
        if size > 1:
            raise ConfigError(
                f"the trainer's {name} in allocation_mode must be 1 (only data parallelism is supported yet): "
                f"got {name}{size}. Write d{mode.train_world_size}p1t1 to use as many devices."
            )


def _check_model(config: GRPOConfig | SFTConfig) -> None:
    key, path = (
        ("actor.path", config.actor.path) if isinstance(config, GRPOConfig) else ("model.path", config.model.path)
    )
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"{key} must be a folder or a hub id: got {path}, which does not exist. Correct {key}.")


def _check_servers(config: GRPOConfig | SFTConfig, mode: AllocationMode) -> None:
    """Refuse servers that we can't start."""
    if isinstance(config, SFTConfig):
        raise ConfigError(
            f"allocation_mode must name trainers only for supervised fine-tuning: got {mode}. "
            f"Write allocation_mode={mode.train}."
        )
    if mode.gen_pp_size > 1 or (mode.gen_backend == "lite" and mode.gen_tp_size > 1):
        limits = "p1t1" if mode.gen_backend == "lite" else "p1"
        raise ConfigError(f"servers of {mode.gen_backend} must have {limits} in allocation_mode: got {mode.gen}.")
    if mode.gen_backend in _OUR_FLAGS:
        _check_server_block(config, mode.gen_backend)
        _check_installed(config, mode)


def _check_server_block(config: GRPOConfig, backend: str) -> None:
    """Refuse what the launcher sets itself; naming the actor's model once more is harmless."""
    block, model = _block(config, backend), _MODEL_FLAGS[backend]
    taken = {name for name in block if name.replace("-", "_") in _OUR_FLAGS[backend]}
    if taken := taken - ({model} if block.get(model) == config.actor.path else set()):
        raise ConfigError(
            f"the {backend} block must leave {', '.join(sorted(_OUR_FLAGS[backend]))} to the launcher: got "
            f"{', '.join(sorted(taken))}. Remove them: actor.path is the model, and allocation_mode says how many GPUs "
            "a server has."
        )


def _check_installed(config: GRPOConfig, mode: AllocationMode) -> None:
    """Ask the servers' interpreter for the program; a folder that merely has its name is none."""
    python = _server_python(config)
    question = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); sys.exit(not (s and s.origin))"
    try:
        answer = subprocess.run([python, "-c", question, str(mode.gen_backend)], timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"launcher.server_python must be a Python interpreter: got {python}, {error}. Correct its path."
        ) from error
    if answer.returncode != 0:
        raise ConfigError(
            f"the backend in allocation_mode must be installed: got {mode}, and {mode.gen_backend} is not in the "
            f"environment of {python}. Set launcher.server_python to the Python of an environment that has it, "
            f"or write lite in place of {mode.gen_backend}."
        )


def _gpus(config: GRPOConfig | SFTConfig, *, needed: int) -> tuple[str, ...]:
    """Return the GPUs to use; none on a CPU cluster."""
    limit = config.cluster.n_gpus_per_node
    if limit == 0:
        return ()
    visible = visible_gpus()
    if needed > min(limit, len(visible)):
        raise ConfigError(
            f"allocation_mode must fit the GPUs: got {config.allocation_mode}, which needs {needed}, with "
            f"cluster.n_gpus_per_node={limit} and {len(visible)} GPUs on this machine. "
            "Make it smaller, or set cluster.n_gpus_per_node=0 to run on the CPU."
        )
    return tuple(visible[:needed])


def visible_gpus() -> list[str]:
    """Return the names of the GPUs this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    return [str(index) for index, _ in enumerate(line for line in listing.splitlines() if line.startswith("GPU "))]


def _server_python(config: GRPOConfig) -> str:
    return os.path.expanduser(config.launcher.server_python or sys.executable)


def _served_model(config: GRPOConfig) -> str:
    """Return the folder or hub id of the model that servers start with."""
    return str(untied_model(config)) if config.rollout.untie_embeddings else config.actor.path


def untied_model(config: GRPOConfig) -> Path:
    """Return where the run keeps the copy of its model that has an output layer of its own."""
    return Path(config.cluster.fileroot).absolute() / config.experiment_name / config.trial_name / "untied_model"


def _block(config: GRPOConfig, backend: str) -> dict[str, Any]:
    """Return the user's flags for a real server."""
    return {"sglang": config.sglang, "vllm": config.vllm}[backend]


def _lite_command(config: GRPOConfig, roles: Roles, *, port: int, index: int) -> list[str]:
    lite = config.lite
    flags = {
        "model_path": _served_model(config),
        "host": LOOPBACK,
        "port": port,
        "threads": lite.threads,
        "slots": lite.slots,
        "context": lite.context,
        "dtype": lite.dtype,
        "deterministic": lite.deterministic,
        "allow_stale_kv": config.rollout.pause_mode == "in_place",
        "weight_version": 0,
        "seed": config.seed + index,
    }
    return [sys.executable, "-m", LITE_MODULE, *_flags(flags)]


def _defaults(config: GRPOConfig, *, no_cache: str) -> dict[str, Any]:
    """Return flags that the user may change: servers compute like the trainer, and without a prefix cache where
    sequences keep theirs when weights change, because they would lend its old part to new ones."""
    return {"dtype": config.actor.dtype} | ({no_cache: True} if config.rollout.pause_mode == "in_place" else {})


def _sglang_command(config: GRPOConfig, roles: Roles, *, port: int, index: int) -> list[str]:
    ours = {
        "model_path": _served_model(config),
        "host": LOOPBACK,
        "port": port,
        "tp_size": roles.gpus_per_server,
        "base_gpu_id": 0,
        "weight_version": 0,
        "random_seed": int(config.sglang.get("random_seed", config.seed)) + index,
    }
    flags = _flags(_defaults(config, no_cache="disable_radix_cache") | config.sglang | ours)
    return [_server_python(config), "-m", "arealite.launcher.sglang_server", *flags]


def _vllm_command(config: GRPOConfig, roles: Roles, *, port: int, index: int) -> list[str]:
    ours = {
        "model": _served_model(config),
        "host": LOOPBACK,
        "port": port,
        "tensor_parallel_size": roles.gpus_per_server,
        "seed": int(config.vllm.get("seed", config.seed)) + index,
    }
    options = _defaults(config, no_cache="no_enable_prefix_caching") | config.vllm | ours
    off = [name for name, value in options.items() if value is False and not name.startswith(("no_", "no-"))]
    flags = _flags(options | {f"no_{name}": True for name in off})
    return [_server_python(config), "-m", "arealite.launcher.vllm_server", *flags]


def _flags(options: Mapping[str, object]) -> list[str]:
    """Spell options as flags: None, False and "" are left out, True is a bare flag, a list is several words and a
    mapping JSON."""
    flags: list[str] = []
    for name, value in options.items():
        if value is None or value is False or value == "":
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list | tuple):
            flags += [str(part) for part in value]
        elif isinstance(value, Mapping):
            flags.append(json.dumps(value))
        elif value is not True:
            flags.append(str(value))
    return flags


def _trainer_threads(config: GRPOConfig | SFTConfig, roles: Roles) -> int:
    """Return what was asked for, or share out the cores that the servers leave; threads that fight for a core are many
    times slower."""
    if config.launcher.trainer_threads is not None:
        return config.launcher.trainer_threads
    foreign = [one for one in roles.foreign_servers.split(",") if one.startswith((LOOPBACK, "localhost"))]
    cores = len(os.sched_getaffinity(0)) - (roles.num_servers + len(foreign)) * config.lite.threads
    return max(1, cores // max(1, roles.num_ranks))


def _environment(user_variables: str, *, python: str = sys.executable, **ours: str) -> dict[str, str]:
    """Return our environment with `ours`, then the user's `A=1,B=2`, in which `python` finds this package.

    Another interpreter than ours must not find what else is installed beside it, but its own programs first.
    """
    env = {"TOKENIZERS_PARALLELISM": "true"} | os.environ | {"PYTHONUNBUFFERED": "1"} | ours
    env |= dict(pair.split("=", 1) for pair in user_variables.split(",") if pair)
    is_foreign = python != sys.executable
    package_root = Path(arealite.__file__).parents[1]
    is_installed = str(package_root) in [*site.getsitepackages(), site.getusersitepackages()]
    if is_foreign:
        env["PATH"] = os.pathsep.join([str(Path(python).parent), env.get("PATH", os.defpath)])
    if is_foreign or not is_installed:
        folder = _folder_of_package() if is_installed else package_root
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH", "")]))
    return env


def _folder_of_package() -> Path:
    """Return a folder with nothing but this package in it: a link in the user's cache."""
    package = Path(arealite.__file__).parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "arealite" / f"package-{hashlib.blake2b(str(package).encode(), digest_size=6).hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / package.name).symlink_to(package, target_is_directory=True)
    return folder

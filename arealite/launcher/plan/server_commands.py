"""The command lines of inference servers, as the config wants them.

Each takes where to listen and how many GPUs it has from whoever places it. Checks here need no machine but this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.launcher.plan.plan import rollout_of

LITE_MODULE = "arealite.server"
_MODEL_FLAGS = {"sglang": "model_path", "vllm": "model"}
_OUR_FLAGS = {
    "sglang": {"model_path", "host", "port", "tp_size", "base_gpu_id", "weight_version"},
    "vllm": {"model", "host", "port", "tensor_parallel_size"},
}
"""Flags of the real servers that the blocks of the config must leave to us."""


def server_command(config: BaseExperimentConfig, *, index: int, num_gpus: int) -> list[str]:
    """Return the command of a server but for `--host` and `--port`, which whoever runs it adds."""
    backend = rollout_of(config).backend
    if backend == "lite":
        return _lite_command(config, index)
    return _sglang_command(config, index, num_gpus) if backend == "sglang" else _vllm_command(config, index, num_gpus)


def check_server_block(config: BaseExperimentConfig) -> None:
    """Refuse what the launcher sets itself; naming the actor's model once more is harmless."""
    backend = rollout_of(config).backend
    if backend == "lite":
        return
    block, model = _block(config, backend), _MODEL_FLAGS[backend]
    taken = {name for name in block if name.replace("-", "_") in _OUR_FLAGS[backend]}
    if taken := taken - ({model} if block.get(model) == config.trained[1].path else set()):
        raise ConfigError(
            f"the {backend} block must leave {', '.join(sorted(_OUR_FLAGS[backend]))} to the launcher: got "
            f"{', '.join(sorted(taken))}. Remove them: actor.path is the model, and allocation_mode says how many GPUs "
            "a server has."
        )


def check_installed(config: BaseExperimentConfig) -> None:
    """Ask the servers' interpreter for the program; a folder that merely has its name is none."""
    backend = rollout_of(config).backend
    if backend == "lite":
        return
    python = server_python(config)
    question = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); sys.exit(not (s and s.origin))"
    try:
        answer = subprocess.run([python, "-c", question, backend], timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"launcher.server_python must be a Python interpreter: got {python}, {error}. Correct its path."
        ) from error
    if answer.returncode != 0:
        raise ConfigError(
            f"the backend in allocation_mode must be installed: got {config.allocation}, and {backend} is not in "
            f"the environment of {python}. Set launcher.server_python to the Python of an environment that has it, "
            f"or write lite in place of {backend}."
        )


def server_python(config: BaseExperimentConfig) -> str:
    """Return the interpreter of real servers."""
    return os.path.expanduser(config.launcher.server_python or sys.executable)


def _block(config: BaseExperimentConfig, backend: str) -> dict[str, Any]:
    """Return the user's flags for a real server."""
    return {"sglang": config.sglang, "vllm": config.vllm}[backend]


def _lite_command(config: BaseExperimentConfig, index: int) -> list[str]:
    lite = config.lite
    flags = {
        "model_path": config.trained[1].path,
        "threads": lite.threads,
        "slots": lite.slots,
        "context": lite.context,
        "dtype": lite.dtype,
        "deterministic": lite.deterministic,
        "allow_stale_kv": rollout_of(config).pause_mode == "in_place",
        "weight_version": 0,
        "seed": config.seed + index,
    }
    return [sys.executable, "-m", LITE_MODULE, *_flags(flags)]


def _defaults(config: BaseExperimentConfig, *, no_cache: str) -> dict[str, Any]:
    """Return flags that the user may change: servers compute like the trainer, and without a prefix cache where
    sequences keep theirs when weights change, because they would lend its old part to new ones."""
    return {"dtype": config.trained[1].dtype} | (
        {no_cache: True} if rollout_of(config).pause_mode == "in_place" else {}
    )


def _sglang_command(config: BaseExperimentConfig, index: int, num_gpus: int) -> list[str]:
    ours = {
        "model_path": config.trained[1].path,
        "tp_size": num_gpus,
        "base_gpu_id": 0,
        "weight_version": 0,
        "random_seed": int(config.sglang.get("random_seed", config.seed)) + index,
    }
    flags = _flags(_defaults(config, no_cache="disable_radix_cache") | config.sglang | ours)
    return [server_python(config), "-m", "arealite.launcher.serve.sglang_server", *flags]


def _vllm_command(config: BaseExperimentConfig, index: int, num_gpus: int) -> list[str]:
    ours = {
        "model": config.trained[1].path,
        "tensor_parallel_size": num_gpus,
        "seed": int(config.vllm.get("seed", config.seed)) + index,
    }
    options = _defaults(config, no_cache="no_enable_prefix_caching") | config.vllm | ours
    off = [name for name, value in options.items() if value is False and not name.startswith(("no_", "no-"))]
    flags = _flags(options | {f"no_{name}": True for name in off})
    return [server_python(config), "-m", "arealite.launcher.serve.vllm_server", *flags]


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

"""The program of a server: its command line, and whether it is installed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError

# Fails for a folder that merely has the package's name.
_INSTALLED = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); sys.exit(not (s and s.origin))"

SHARED_MEMORY = 0.5
"""Default share of a GPU's memory of a server that shares its GPU with the trainer."""


class ServerProgram:
    """The program of an experiment's servers, with the flags of their block in the config."""

    def __init__(self, config: BaseExperimentConfig) -> None:
        self._config, self.kind = config, config.server_kind
        self._block: dict[str, Any] = dict(getattr(config, self.kind.name))
        self._shares_gpus = (  # servers on CPUs are asked to sleep, too, which saves no memory
            config.rollout is not None and config.rollout.servers_sleep and config.cluster.n_gpus_per_node > 0
        )

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        chosen = None if self.kind.is_embedded else self._config.launcher.server_python
        return os.path.expanduser(chosen or sys.executable)

    @property
    def flags(self) -> dict[str, Any]:
        """The user's flags, which may be spelled with hyphens, with underscores."""
        return {name.replace("-", "_"): value for name, value in self._block.items()}

    def command(self, *, index: int, num_gpus: int) -> list[str]:
        """Return the command of server `index` without `--host` and `--port`, which its caller adds."""
        config, kind = self._config, self.kind
        model, rollout, sampling = config.trained[1], config.rollout, config.sampling
        flags: dict[str, object] = {"dtype": model.dtype}  # servers compute like the trainer by default
        flags |= {kind.in_place_flag: True} if rollout and rollout.pause_mode == "in_place" else {}
        flags |= {kind.kept_flag: True} if kind.kept_flag and sampling and sampling.narrows else {}
        flags |= {kind.memory_flag: SHARED_MEMORY} if self._shares_gpus else {}
        flags |= self.flags | {kind.model_flag: model.path}
        flags |= {kind.sleep_flag: True} if self._shares_gpus else {}
        flags |= {kind.gpus_flag: num_gpus} if kind.gpus_flag else {}
        flags |= {"threads": config.lite_threads} if kind.is_embedded else {}
        flags |= {**kind.fixed_flags, kind.seed_flag: self._seed + index}
        return [self.python, "-m", kind.module, *self._spelled(flags)]

    def check_block(self) -> None:
        """Refuse flags that the launcher sets, unless they repeat the model, and a seed that is no number."""
        kind = self.kind
        owned = {kind.model_flag, "host", "port", kind.gpus_flag, *kind.fixed_flags} - {""}
        owned |= {kind.sleep_flag} if self._shares_gpus else set()
        given = {name: (name.replace("-", "_"), value) for name, value in self._block.items()}
        repeated = kind.model_flag, self._config.trained[1].path
        taken = [name for name, flag in given.items() if flag[0] in owned and flag != repeated]
        if taken:
            raise ConfigError(
                f"the {kind.name} block must leave {', '.join(sorted(owned))} to the launcher: got "
                f"{', '.join(sorted(taken))}. Remove them: actor.path is the model, and allocation_mode says how many "
                "GPUs a server has."
            )
        _ = self._seed

    @property
    def _seed(self) -> int:
        """The seed of the first server: the user's, or that of the run."""
        seed = self.flags.get(self.kind.seed_flag)
        try:
            return int(self._config.seed if seed is None else seed)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.kind.name}.{self.kind.seed_flag} must be a whole number: got {seed!r}. Correct it."
            ) from error

    def check_installed(self) -> None:
        """Refuse a package that the interpreter does not find."""
        package, python = self.kind.package, self.python
        if package is None:
            return
        try:
            answer = subprocess.run([python, "-c", _INSTALLED, package], timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"launcher.server_python must be a Python interpreter: got {python}, {error}. Correct its path."
            ) from error
        if answer.returncode != 0:
            raise ConfigError(
                f"the backend in allocation_mode must be installed: got {self._config.allocation}, and {package} is "
                f"not in the environment of {python}. Set launcher.server_python to the Python of an environment that "
                f"has it, or write lite in place of {self.kind.name}."
            )

    def _spelled(self, flags: Mapping[str, object]) -> list[str]:
        """Spell flags: None and "" are left out, True is a bare flag, a list is several words and a mapping JSON."""
        words: list[str] = []
        for name, value in flags.items():
            flag = name.replace("_", "-")
            if value is True:
                words.append(f"--{flag}")
            elif value is False and self.kind.has_negated_flags and not flag.startswith("no-"):
                words.append(f"--no-{flag}")
            elif isinstance(value, list | tuple):
                words += [f"--{flag}", *map(str, value)]
            elif value is not None and value is not False and value != "":
                words += [f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
        return words

"""How a kind of server is installed, configured, started and stopped. Without torch, because launchers import it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.inference.backends.base import Backend
from arealite.inference.http import Json

# Fails for a folder that merely has the package's name.
_INSTALLED = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); sys.exit(not (s and s.origin))"

SHARED_MEMORY = 0.5
"""Share of a GPU that a server takes which sleeps while the trainer computes on it, unless it is told another."""


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """What differs between kinds of servers, apart from the wire protocol. Flags are spelled with underscores."""

    name: str
    backend: type[Backend]  # its wire protocol
    module: str  # program that `launcher.server_python` runs
    package: str | None  # what must be installed there; None is a server of ours, which runs on our own interpreter
    block: Callable[[BaseExperimentConfig], dict[str, Any]]  # the user's flags
    model_flag: str
    seed_flag: str
    gpus_flag: str  # number of GPUs; empty if a server has one at most
    context_flag: str
    memory_flag: str  # share of the GPU's memory for weights and cache; empty if it can't be limited
    in_place_flag: str  # what pause_mode=in_place needs: a prefix cache would lend old keys and values to new sequences
    kept_flag: str = ""  # what makes it return the ids that tokens were sampled from; empty if each request does
    fixed_flags: Mapping[str, object] = field(default_factory=dict)  # further flags that are the same for every run
    sleep_flag: str = ""  # what lets it give back a GPU's memory; empty if it can't
    sleep_env: Mapping[str, str] = field(default_factory=dict)  # variables of one that sleeps
    has_negated_flags: bool = False  # whether `--no-x` turns off what `x: false` means; otherwise it is left out
    abort_call: tuple[str, Json] | None = None  # what ends requests with the tokens so far; None if SIGTERM does
    tied_embeddings_defect: str = ""  # why new weights of a model with tied embeddings may be wrong, and what to do

    @property
    def is_embedded(self) -> bool:
        """Whether it is our own server, which writes heartbeats."""
        return self.package is None

    def python(self, config: BaseExperimentConfig) -> str:
        """Return the interpreter that runs servers of this kind."""
        chosen = None if self.is_embedded else config.launcher.server_python
        return os.path.expanduser(chosen or sys.executable)

    def flags(self, config: BaseExperimentConfig) -> dict[str, Any]:
        """Return the user's flags, which may be spelled with hyphens."""
        return {name.replace("-", "_"): value for name, value in self.block(config).items()}

    def command(self, config: BaseExperimentConfig, *, index: int, num_gpus: int) -> list[str]:
        """Return the command of server `index` except `--host` and `--port`, which whoever runs it adds."""
        block, model = self.flags(config), config.trained[1]
        flags: dict[str, object] = {"dtype": model.dtype}  # servers compute like the trainer unless told not to
        flags |= {self.in_place_flag: True} if config.rollout and config.rollout.pause_mode == "in_place" else {}
        flags |= {self.kept_flag: True} if self.kept_flag and config.sampling and config.sampling.narrows else {}
        flags |= {self.memory_flag: SHARED_MEMORY} if _shares_gpus(config) else {}
        flags |= block | {self.model_flag: model.path}
        flags |= {self.sleep_flag: True} if _shares_gpus(config) else {}
        flags |= {self.gpus_flag: num_gpus} if self.gpus_flag else {}
        flags |= {**self.fixed_flags, self.seed_flag: self._seed(config) + index}
        return [self.python(config), "-m", self.module, *self._spelled(flags)]

    def check_block(self, config: BaseExperimentConfig) -> None:
        """Refuse flags that the launcher sets, unless they repeat the model, and a seed that is no number."""
        owned = {self.model_flag, "host", "port", self.gpus_flag, *self.fixed_flags} - {""}
        owned |= {self.sleep_flag} if _shares_gpus(config) else set()
        given = {name: (name.replace("-", "_"), value) for name, value in self.block(config).items()}
        repeated = self.model_flag, config.trained[1].path
        taken = [name for name, flag in given.items() if flag[0] in owned and flag != repeated]
        if taken:
            raise ConfigError(
                f"the {self.name} block must leave {', '.join(sorted(owned))} to the launcher: got "
                f"{', '.join(sorted(taken))}. Remove them: actor.path is the model, and allocation_mode says how many "
                "GPUs a server has."
            )
        self._seed(config)

    def _seed(self, config: BaseExperimentConfig) -> int:
        """Return the seed of the first server: the user's, or that of the run."""
        seed = self.flags(config).get(self.seed_flag)
        try:
            return int(config.seed if seed is None else seed)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name}.{self.seed_flag} must be a whole number: got {seed!r}. Correct it."
            ) from error

    def check_installed(self, config: BaseExperimentConfig) -> None:
        """Ask the servers' interpreter for the package."""
        if self.package is None:
            return
        python = self.python(config)
        try:
            answer = subprocess.run([python, "-c", _INSTALLED, self.package], timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"launcher.server_python must be a Python interpreter: got {python}, {error}. Correct its path."
            ) from error
        if answer.returncode != 0:
            raise ConfigError(
                f"the backend in allocation_mode must be installed: got {config.allocation}, and {self.package} is not "
                f"in the environment of {python}. Set launcher.server_python to the Python of an environment that has "
                f"it, or write lite in place of {self.name}."
            )

    def _spelled(self, flags: Mapping[str, object]) -> list[str]:
        """Spell flags: None and "" are left out, True is a bare flag, a list is several words and a mapping JSON."""
        words: list[str] = []
        for name, value in flags.items():
            flag = name.replace("_", "-")
            if value is True:
                words.append(f"--{flag}")
            elif value is False and self.has_negated_flags and not flag.startswith("no-"):
                words.append(f"--no-{flag}")
            elif isinstance(value, list | tuple):
                words += [f"--{flag}", *map(str, value)]
            elif value is not None and value is not False and value != "":
                words += [f"--{flag}", json.dumps(value) if isinstance(value, Mapping) else str(value)]
        return words


def _shares_gpus(config: BaseExperimentConfig) -> bool:
    """Tell whether servers sleep for the trainer's sake; on CPUs they hear of it, and no memory is saved."""
    return config.rollout is not None and config.rollout.servers_sleep and config.cluster.n_gpus_per_node > 0

"""The config of a run as launchers see it, whatever experiment the script makes of it."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from arealite.api.config import checks
from arealite.api.config.data import DatasetConfig
from arealite.api.config.experiment import EXPERIMENTS, BaseExperimentConfig, GRPOConfig, SFTConfig
from arealite.api.config.loader import load_expr_config
from arealite.api.config.model import PPOActorConfig, TrainEngineConfig
from arealite.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.config.types import PositiveInt
from arealite.api.errors import ConfigError

_OF_MASTERS = ("arealite.core.workers", "arealite.core.master")


class _TrainingSampling(GenerationHyperparameters):
    """Groups are as large as `GRPOConfig` makes them, from which a class of the script most likely inherits."""

    n_samples: PositiveInt = GRPOConfig().gconfig.n_samples


class RunConfig(BaseExperimentConfig):
    """The blocks that an experiment may have; the script's own class judges which it must have, and the keys of others.

    Without a `rollout` block, a `gconfig` block or servers in the allocation of an `actor` mean its defaults.
    """

    DEFAULTS_FROM: ClassVar[dict[str, str]] = SFTConfig.DEFAULTS_FROM | GRPOConfig.DEFAULTS_FROM

    train_dataset: DatasetConfig = DatasetConfig(path="")
    """Training data; a server or an evaluation has none."""
    actor: PPOActorConfig | None = None
    """The trained model of an experiment with a policy."""
    model: TrainEngineConfig | None = None
    """The trained model of an experiment without one."""
    ref: dict[str, Any] | None = None
    """A frozen reference."""
    teacher: dict[str, Any] | None = None
    """A frozen teacher."""
    gconfig: _TrainingSampling | None = None
    """Sampling of training episodes."""
    eval_gconfig: GenerationHyperparameters | None = None
    """Sampling of evaluations."""

    def derive(self) -> None:
        """Give a run with a policy and servers a `rollout` block."""
        names_servers = self.allocation is not None and self.allocation.gen_backend is not None
        if self.rollout is None and (self.gconfig is not None or (self.actor is not None and names_servers)):
            self.rollout = InferenceEngineConfig(consumer_batch_size=self.train_dataset.batch_size)
        super().derive()
        self.tokenizer_path = self.tokenizer_path or self.trained[1].path

    def check(self) -> None:
        """Refuse contradictions between the blocks that it has."""
        super().check()
        if self.rollout is not None and self.gconfig is not None:
            eval_gconfig = self.eval_gconfig or self.gconfig
            checks.check_servers(self.rollout, self.lite, gconfig=self.gconfig, eval_gconfig=eval_gconfig)


def load_run_config(argv: Sequence[str], entry: Path | None = None) -> BaseExperimentConfig:
    """Load what a launcher needs of `--config FILE key=value ...`.

    If the script `entry` loads a config class of ours, that class refuses what the script would refuse, before anything
    starts. A class of its own judges its keys at the top level and in the block of a model itself.
    """
    nodes = _nodes(entry) if entry is not None else []
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    loads = [call for call in calls if last_name(call.func) == "load_expr_config" and len(call.args) == 2]
    ours: dict[str, type[BaseExperimentConfig]] = {cls.__name__: cls for cls in EXPERIMENTS}
    names = {last_name(call.args[1]) for call in loads}
    cls = ours.get(names.pop(), RunConfig) if len(names) == 1 else RunConfig
    config = load_expr_config(argv, cls, ignore_unknown=cls is RunConfig)[0]
    if any(isinstance(node, ast.ImportFrom) and node.module in _OF_MASTERS for node in nodes):
        checks.check_workers(config.workers)
    return config


def script_calls(entry: Path) -> list[ast.Call]:
    """Return the calls in a script."""
    return [node for node in _nodes(entry) if isinstance(node, ast.Call)]


def _nodes(entry: Path) -> list[ast.AST]:
    try:
        return [*ast.walk(ast.parse(entry.read_bytes()))]
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the entry script must be Python: got {entry}, {error}. Correct it there.") from error


def declared_check(entry: Path) -> str | None:
    """Return the name, perhaps with dots, that a script passes as `launched(..., check=NAME)`; None if it has none."""
    launches = [call for call in script_calls(entry) if last_name(call.func) == "launched"]
    checks = [keyword.value for call in launches for keyword in call.keywords if keyword.arg == "check"]
    return ast.unparse(checks[0]) if checks else None


def last_name(node: ast.expr) -> str:
    """Return `b` of `b` and of `a.b`."""
    return ast.unparse(node).rpartition(".")[2]

"""The config of a run as launchers see it, whatever experiment the script makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from arealite.api.config import checks
from arealite.api.config.experiment import BaseExperimentConfig, GRPOConfig, SFTConfig
from arealite.api.config.loader import load_expr_config
from arealite.api.config.model import PPOActorConfig, TrainEngineConfig
from arealite.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError


@dataclass
class RunConfig(BaseExperimentConfig):
    """The blocks that an experiment may have; the script's own class judges which it must have, and the keys of others.

    Without a `rollout` block, a `gconfig` block or servers in the allocation of an `actor` mean its defaults.
    """

    DEFAULTS_FROM: ClassVar[dict[str, str]] = SFTConfig.DEFAULTS_FROM | GRPOConfig.DEFAULTS_FROM

    actor: PPOActorConfig | None = None
    """The trained model of an experiment with a policy."""
    model: TrainEngineConfig | None = None
    """The trained model of an experiment without one."""
    ref: dict[str, Any] | None = None
    """A frozen reference."""
    gconfig: GenerationHyperparameters | None = None
    """Sampling of training episodes."""
    eval_gconfig: GenerationHyperparameters | None = None
    """Sampling of evaluations."""

    @property
    def trained(self) -> tuple[str, TrainEngineConfig]:
        if self.actor is not None:
            return "actor", self.actor
        if self.model is not None:
            return "model", self.model
        raise ConfigError("actor.path or model.path must be given: got neither. Set the one that the script trains.")

    @property
    def sampling(self) -> GenerationHyperparameters | None:
        return self.gconfig

    @property
    def has_reference(self) -> bool:
        return self.ref is not None

    def validate(self) -> None:
        names_servers = self.allocation is not None and self.allocation.gen_backend is not None
        if self.rollout is None and (self.gconfig is not None or (self.actor is not None and names_servers)):
            self.rollout = InferenceEngineConfig(consumer_batch_size=self.train_dataset.batch_size)
        super().validate()
        self.tokenizer_path = self.tokenizer_path or self.trained[1].path
        if self.rollout is not None and self.gconfig is not None:
            eval_gconfig = self.eval_gconfig or self.gconfig
            checks.check_servers(self.rollout, self.lite, self.gconfig, eval_gconfig)


def load_run_config(argv: Sequence[str]) -> RunConfig:
    """Load what a launcher needs of `--config FILE key=value ...`, for a script with any config class.

    Keys that are unknown at the top level or in the block of a model are left to the script.
    """
    return load_expr_config(argv, RunConfig, ignore_unknown=True)[0]

"""Every knob of a run, under the path of the original; `arealite.api.config` holds the classes, one family per file."""

from arealite.api.config.data import DatasetConfig, EvaluatorConfig, RecoverConfig, SaverConfig
from arealite.api.config.experiment import BaseExperimentConfig, GRPOConfig, SFTConfig
from arealite.api.config.launcher import ClusterSpecConfig, LauncherConfig, SlurmLauncherConfig
from arealite.api.config.loader import load_expr_config, to_yaml
from arealite.api.config.loggers import StatsLoggerConfig, TensorBoardConfig
from arealite.api.config.model import (
    FSDPEngineConfig,
    FSDPWrapPolicy,
    MicroBatchSpec,
    PPOActorConfig,
    TrainEngineConfig,
)
from arealite.api.config.optimizer import OptimizerConfig
from arealite.api.config.rollout import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    LiteConfig,
    WeightCheckConfig,
)
from arealite.api.config.schema import config_help

__all__ = [
    "BaseExperimentConfig",
    "ClusterSpecConfig",
    "DatasetConfig",
    "EvaluatorConfig",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "LauncherConfig",
    "LiteConfig",
    "MicroBatchSpec",
    "OptimizerConfig",
    "PPOActorConfig",
    "RecoverConfig",
    "SFTConfig",
    "SaverConfig",
    "SlurmLauncherConfig",
    "StatsLoggerConfig",
    "TensorBoardConfig",
    "TrainEngineConfig",
    "WeightCheckConfig",
    "config_help",
    "load_expr_config",
    "to_yaml",
]

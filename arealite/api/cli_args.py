"""Every knob of a run, under the path of the original; `arealite.api.config` holds the classes, one family per file."""

from arealite.api.config.data import DatasetConfig as DatasetConfig
from arealite.api.config.data import EvaluatorConfig as EvaluatorConfig
from arealite.api.config.data import RecoverConfig as RecoverConfig
from arealite.api.config.data import SaverConfig as SaverConfig
from arealite.api.config.data import StatsLoggerConfig as StatsLoggerConfig
from arealite.api.config.data import TensorBoardConfig as TensorBoardConfig
from arealite.api.config.experiment import BaseExperimentConfig as BaseExperimentConfig
from arealite.api.config.experiment import GRPOConfig as GRPOConfig
from arealite.api.config.experiment import SFTConfig as SFTConfig
from arealite.api.config.launcher import ClusterSpecConfig as ClusterSpecConfig
from arealite.api.config.launcher import LauncherConfig as LauncherConfig
from arealite.api.config.launcher import SlurmLauncherConfig as SlurmLauncherConfig
from arealite.api.config.loader import load_expr_config as load_expr_config
from arealite.api.config.loader import masked as masked
from arealite.api.config.loader import to_yaml as to_yaml
from arealite.api.config.model import FSDPEngineConfig as FSDPEngineConfig
from arealite.api.config.model import FSDPWrapPolicy as FSDPWrapPolicy
from arealite.api.config.model import MicroBatchSpec as MicroBatchSpec
from arealite.api.config.model import OptimizerConfig as OptimizerConfig
from arealite.api.config.model import PPOActorConfig as PPOActorConfig
from arealite.api.config.model import TrainEngineConfig as TrainEngineConfig
from arealite.api.config.rollout import GenerationHyperparameters as GenerationHyperparameters
from arealite.api.config.rollout import InferenceEngineConfig as InferenceEngineConfig
from arealite.api.config.rollout import LiteConfig as LiteConfig
from arealite.api.config.rollout import WeightCheckConfig as WeightCheckConfig
from arealite.api.config.schema import config_help as config_help

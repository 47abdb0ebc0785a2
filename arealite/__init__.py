"""AReaLite: asynchronous reinforcement learning of language models.

The names that scripts use are here: `from arealite import RLVRWorkflow, FSDPPPOActor`. Each is imported when it is
first used, so that `import arealite` stays quick; type checkers and editors read the imports below.
"""

import gc
import os
import sys

# Modules live as long as the process: looking for garbage among torch's while they are imported took a tenth of the CPU
# time of a process that starts.
gc.set_threshold(10_000, *gc.get_threshold()[1:])

if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd():  # a json.py of the user's is not the standard library's
    sys.path.append(sys.path.pop(0))

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for true; importing typing costs more than all of this
if TYPE_CHECKING:
    from arealite.agent.workflow import AgentWorkflow as AgentWorkflow
    from arealite.api.cli_args import DPOConfig as DPOConfig
    from arealite.api.cli_args import EvalConfig as EvalConfig
    from arealite.api.cli_args import GenerationHyperparameters as GenerationHyperparameters
    from arealite.api.cli_args import GRPOConfig as GRPOConfig
    from arealite.api.cli_args import OptimizerConfig as OptimizerConfig
    from arealite.api.cli_args import PPOActorConfig as PPOActorConfig
    from arealite.api.cli_args import PPOConfig as PPOConfig
    from arealite.api.cli_args import PPOCriticConfig as PPOCriticConfig
    from arealite.api.cli_args import RWConfig as RWConfig
    from arealite.api.cli_args import SFTConfig as SFTConfig
    from arealite.api.cli_args import TrainEngineConfig as TrainEngineConfig
    from arealite.api.cli_args import load_expr_config as load_expr_config
    from arealite.api.env_api import Environment as Environment
    from arealite.api.io_struct import FinetuneSpec as FinetuneSpec
    from arealite.api.io_struct import ModelRequest as ModelRequest
    from arealite.api.io_struct import ModelResponse as ModelResponse
    from arealite.api.io_struct import SaveLoadMeta as SaveLoadMeta
    from arealite.api.workflow_api import RolloutWorkflow as RolloutWorkflow
    from arealite.dataset import get_custom_dataset as get_custom_dataset
    from arealite.dataset import load_datasets as load_datasets
    from arealite.dataset.loader import PromptLoader as PromptLoader
    from arealite.engine.dpo.dpo_engine import FSDPDPOEngine as FSDPDPOEngine
    from arealite.engine.ppo.actor import FSDPPPOActor as FSDPPPOActor
    from arealite.engine.ppo.critic import FSDPPPOCritic as FSDPPPOCritic
    from arealite.engine.rw.rw_engine import FSDPRWEngine as FSDPRWEngine
    from arealite.engine.sft.lm_engine import FSDPLMEngine as FSDPLMEngine
    from arealite.generation.engine import GenerationEngine as GenerationEngine
    from arealite.generation.model_runner import ModelRunner as ModelRunner
    from arealite.generation.request import GenerationRequest as GenerationRequest
    from arealite.generation.request import SamplingParams as SamplingParams
    from arealite.inference.remote_engine import RemoteInferenceEngine as RemoteInferenceEngine
    from arealite.reward import gsm8k_reward_fn as gsm8k_reward_fn
    from arealite.reward import load_rewards as load_rewards
    from arealite.trainer.evaluator import Evaluator as Evaluator
    from arealite.trainer.recover import Recover as Recover
    from arealite.trainer.saver import Saver as Saver
    from arealite.trainer.stats_logger import StatsLogger as StatsLogger
    from arealite.utils.hf import load_hf_tokenizer as load_hf_tokenizer
    from arealite.weights.publish import publish_weights as publish_weights
    from arealite.workflow.env import EnvWorkflow as EnvWorkflow
    from arealite.workflow.multi_turn import MultiTurnWorkflow as MultiTurnWorkflow
    from arealite.workflow.rlvr import RLVRWorkflow as RLVRWorkflow
    from arealite.workflow.tools import FunctionTools as FunctionTools
    from arealite.workflow.vision_rlvr import VisionRLVRWorkflow as VisionRLVRWorkflow

_NAMES = {
    "arealite.agent.workflow": "AgentWorkflow",
    "arealite.api.cli_args": "DPOConfig EvalConfig GRPOConfig GenerationHyperparameters OptimizerConfig PPOActorConfig "
    "PPOConfig PPOCriticConfig RWConfig SFTConfig TrainEngineConfig load_expr_config",
    "arealite.api.env_api": "Environment",
    "arealite.api.io_struct": "FinetuneSpec ModelRequest ModelResponse SaveLoadMeta",
    "arealite.api.workflow_api": "RolloutWorkflow",
    "arealite.dataset": "get_custom_dataset load_datasets",
    "arealite.dataset.loader": "PromptLoader",
    "arealite.engine.dpo.dpo_engine": "FSDPDPOEngine",
    "arealite.engine.ppo.actor": "FSDPPPOActor",
    "arealite.engine.ppo.critic": "FSDPPPOCritic",
    "arealite.engine.rw.rw_engine": "FSDPRWEngine",
    "arealite.engine.sft.lm_engine": "FSDPLMEngine",
    "arealite.generation.engine": "GenerationEngine",
    "arealite.generation.model_runner": "ModelRunner",
    "arealite.generation.request": "GenerationRequest SamplingParams",
    "arealite.inference.remote_engine": "RemoteInferenceEngine",
    "arealite.reward": "gsm8k_reward_fn load_rewards",
    "arealite.trainer.evaluator": "Evaluator",
    "arealite.trainer.recover": "Recover",
    "arealite.trainer.saver": "Saver",
    "arealite.trainer.stats_logger": "StatsLogger",
    "arealite.utils.hf": "load_hf_tokenizer",
    "arealite.weights.publish": "publish_weights",
    "arealite.workflow.env": "EnvWorkflow",
    "arealite.workflow.multi_turn": "MultiTurnWorkflow",
    "arealite.workflow.rlvr": "RLVRWorkflow",
    "arealite.workflow.tools": "FunctionTools",
    "arealite.workflow.vision_rlvr": "VisionRLVRWorkflow",
}
"""Public names by the module that has them."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'arealite' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

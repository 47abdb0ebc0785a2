"""Inference on vLLM, and on nothing else."""

from __future__ import annotations

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.inference.remote_engine import RemoteInferenceEngine


class RemoteVLLMEngine(RemoteInferenceEngine):
    """An inference engine on vLLM processes."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        if config.backend != "vllm":
            raise ConfigError(
                f"rollout.backend must be vllm for RemoteVLLMEngine: got {config.backend}. Change allocation_mode, or "
                "construct a RemoteInferenceEngine, which takes any."
            )
        super().__init__(config)

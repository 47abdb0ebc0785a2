"""Inference on SGLang, or on our embedded server, which speaks its dialect, and on nothing else."""

from __future__ import annotations

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.inference.remote_engine import RemoteInferenceEngine


class RemoteSGLangEngine(RemoteInferenceEngine):
    """An inference engine on SGLang or `arealite.server` processes."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        if config.backend == "vllm":
            raise ConfigError(
                "rollout.backend must be sglang or lite for RemoteSGLangEngine: got vllm. Change allocation_mode, or "
                "construct a RemoteInferenceEngine, which takes any."
            )
        super().__init__(config)

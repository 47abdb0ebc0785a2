"""Inference on vLLM, and on nothing else."""

from arealite.inference.backends.vllm import VLLMBackend
from arealite.inference.remote_engine import RemoteInferenceEngine


class RemoteVLLMEngine(RemoteInferenceEngine):
    """An inference engine on vLLM processes."""

    protocol = VLLMBackend

"""Protocols of inference servers, one file each; `arealite.api.servers` has the other facts of each kind."""

from arealite.api.servers import BackendName
from arealite.inference.backends.base import Backend
from arealite.inference.backends.lite import LiteBackend
from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.backends.vllm import VLLMBackend

__all__ = ["BACKENDS", "Backend"]

BACKENDS: dict[BackendName, type[Backend]] = {"sglang": SGLangBackend, "vllm": VLLMBackend, "lite": LiteBackend}

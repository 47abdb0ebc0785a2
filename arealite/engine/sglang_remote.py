"""Inference on servers that speak SGLang's protocol: SGLang itself, and our embedded server."""

from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.remote_engine import RemoteInferenceEngine


class RemoteSGLangEngine(RemoteInferenceEngine):
    """An inference engine on SGLang or `arealite.server` processes."""

    protocol = SGLangBackend

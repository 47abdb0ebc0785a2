"""Kinds of inference servers, one file each: its protocol, its flags and how it is started."""

from arealite.api.cli_args import BaseExperimentConfig
from arealite.inference.backends.base import Backend
from arealite.inference.backends.kind import ServerKind
from arealite.inference.backends.lite import LITE
from arealite.inference.backends.sglang import SGLANG
from arealite.inference.backends.vllm import VLLM

__all__ = ["KINDS", "Backend", "ServerKind", "kind_of"]

KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (SGLANG, VLLM, LITE)}


def kind_of(config: BaseExperimentConfig) -> ServerKind:
    """Return the kind of the servers of an experiment that has some."""
    assert config.rollout is not None, type(config)
    return KINDS[config.rollout.backend]

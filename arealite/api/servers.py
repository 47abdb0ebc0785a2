"""Kinds of inference servers: what each supports, and how its program is configured.

Another kind is an entry here, its protocol in a file of `arealite.inference.backends` with its line in `BACKENDS`
there, and a block of its flags in `BaseExperimentConfig`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

BackendName = Literal["sglang", "vllm", "lite"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """What differs between kinds of servers, apart from the wire protocol. Flags are spelled with underscores."""

    name: BackendName
    """Also the block of its flags in a config."""
    module: str
    """Program that `launcher.server_python` runs."""
    package: str | None
    """What must be installed there; None is a server of ours, which runs on our own interpreter."""
    model_flag: str
    seed_flag: str
    gpus_flag: str
    """Number of GPUs; empty if a server has one at most."""
    context_flag: str
    memory_flag: str
    """Share of the GPU's memory for weights and cache; empty if it can't be limited."""
    in_place_flag: str
    """Required by pause_mode=in_place: a prefix cache would lend old keys and values to new sequences."""
    kept_flag: str = ""
    """Makes it return the ids that tokens were sampled from; empty if each request does."""
    fixed_flags: Mapping[str, object] = field(default_factory=dict)
    """Further flags that are the same for every run."""
    sleep_flag: str = ""
    """Lets it give back a GPU's memory; empty if it can't."""
    sleep_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a server that sleeps."""
    has_negated_flags: bool = False
    """Whether `--no-x` turns off what `x: false` means; otherwise the flag is left out."""
    abort_call: tuple[str, dict[str, Any]] | None = None
    """Endpoint and body that end requests with the tokens so far; None if SIGTERM does."""
    tied_embeddings_defect: str = ""
    """Why new weights of a model with tied embeddings may be wrong, and what to do."""
    pause_modes: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
    max_temperature: float = math.inf
    max_kept_ids: float = math.inf
    """Largest top_k for which it returns the ids that a token was sampled from."""
    returns_kept_on_cpu: bool = True
    """Whether it returns these ids without a GPU, too."""
    delays_stop_strings: bool = True
    """Whether stop strings are searched for only after `min_new_tokens`."""

    @property
    def is_embedded(self) -> bool:
        """Whether it is our own server, which writes heartbeats and which the `lite` block describes."""
        return self.package is None


SGLANG = ServerKind(
    name="sglang",
    module="arealite.launcher.serve.sglang_server",
    package="sglang",
    model_flag="model_path",
    seed_flag="random_seed",
    gpus_flag="tp_size",
    context_flag="context_length",
    memory_flag="mem_fraction_static",
    in_place_flag="disable_radix_cache",
    fixed_flags={"base_gpu_id": 0, "weight_version": 0},
    sleep_flag="enable_memory_saver",
    sleep_env={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},  # else /health samples, which waits while it sleeps
    abort_call=("/pause_generation", {"mode": "abort"}),
    max_kept_ids=4096,
    delays_stop_strings=False,
)
VLLM = ServerKind(
    name="vllm",
    module="arealite.launcher.serve.vllm_server",
    package="vllm",
    model_flag="model",
    seed_flag="seed",
    gpus_flag="tensor_parallel_size",
    context_flag="max_model_len",
    memory_flag="gpu_memory_utilization",
    in_place_flag="no_enable_prefix_caching",
    kept_flag="return_sampling_mask",
    sleep_flag="enable_sleep_mode",
    has_negated_flags=True,
    abort_call=("/pause?mode=abort", {}),
    tied_embeddings_defect=(
        "The model's embeddings are tied, and vLLM on a CPU serves wrong logits after it has reloaded such a model: "
        "there use a model with tie_word_embeddings=false"
    ),
    pause_modes=("abort", "retract", "in_place", "wait"),
    max_temperature=2.0,
    returns_kept_on_cpu=False,
)
LITE = ServerKind(
    name="lite",
    module="arealite.server",
    package=None,
    model_flag="model_path",
    seed_flag="seed",
    gpus_flag="",
    context_flag="context",
    memory_flag="",
    in_place_flag="allow_stale_kv",
    fixed_flags={"weight_version": 0},
)

KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (SGLANG, VLLM, LITE)}
assert KINDS.keys() == set(get_args(BackendName)), KINDS.keys()


def kinds_where(is_supported: Callable[[ServerKind], bool]) -> str:
    """Name the kinds of servers to use instead."""
    return " or ".join(kind.name for kind in KINDS.values() if is_supported(kind))

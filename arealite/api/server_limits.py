"""What a config may ask of each kind of inference server; the rest of a kind is its file in `inference.backends`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

BackendName = Literal["sglang", "vllm", "lite"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]
BACKENDS: tuple[str, ...] = get_args(BackendName)


@dataclass(frozen=True)
class ServerLimits:
    """What a kind of server supports, where kinds differ."""

    pause_modes: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
    max_temperature: float = math.inf
    has_narrowed_logprobs: bool = True
    """Whether top_p and top_k narrow the distribution of the logprobs too, and not only the one that is sampled."""
    is_embedded: bool = False
    """Whether the `lite` block describes it."""
    delays_stop_strings: bool = True
    """Whether stop strings are searched for only after `min_new_tokens`."""


LIMITS: dict[str, ServerLimits] = {
    "lite": ServerLimits(is_embedded=True),
    "sglang": ServerLimits(has_narrowed_logprobs=False, delays_stop_strings=False),
    "vllm": ServerLimits(pause_modes=("abort", "retract", "in_place", "wait"), max_temperature=2.0),
}


def backends_where(is_supported: Callable[[ServerLimits], bool]) -> str:
    """Name the kinds of servers to use instead."""
    return " or ".join(name for name in BACKENDS if is_supported(LIMITS[name]))

"""The engine's input and output as plain data: a request, its sampling parameters, its result."""

from dataclasses import dataclass, field
from typing import Literal

from arealite.utils.images import Images

GREEDY_TEMPERATURE = 1e-6  # temperatures below this one mean greedy decoding, as in SGLang


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. Logprobs are those of the distribution that was sampled: after temperature, top_k,
    top_p, min_p and the ban of stop tokens before `min_new_tokens`; those of greedy tokens at temperature 1, whole."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0  # keep the most likely tokens up to this mass, including the token that reaches it
    top_k: int = -1  # keep this many of the most likely tokens; -1 is all; `top_p` is a share of the mass before this
    min_p: float = 0.0  # keep tokens that are at least this many times as likely as the likeliest one
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # ignore the model's end-of-sequence tokens; `stop_token_ids` still stop
    seed: int = 0  # the random number of the token at absolute position p is a hash of (seed, p)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample. Several requests may share a `rid`."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    returns_kept: bool = False  # whether the result has the ids that each token was sampled from
    # What the placeholders among `input_ids` stand for; requests that share it, prefill once.
    images: Images | None = None


@dataclass(frozen=True)
class FinishReason:
    """Why a sequence ended: a stop token (`matched` is its id) or string, the token or context limit, or an abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""


@dataclass
class VersionSpan:
    """Output tokens `[start, end)` were sampled from the weights of `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class GenerationResult:
    """A finished completion, its stop token included."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: str  # of the weights when the sequence ended
    version_spans: list[VersionSpan] = field(default_factory=list)
    stale_kv_tokens: int = 0  # output tokens that were sampled on keys and values of older weights
    kept: list[list[int]] = field(default_factory=list)  # ids that each token was sampled from, if requested


class GenerationError(RuntimeError):
    """The engine could not finish a request."""

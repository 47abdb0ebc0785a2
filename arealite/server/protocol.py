"""Bodies of requests and replies: the supported part of SGLang 0.5's protocol. Unknown fields and unsupported values
are errors, never silently dropped."""

import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from arealite.api.io_struct import ParamSpec
from arealite.generation.request import GREEDY_TEMPERATURE, GenerationRequest, GenerationResult, SamplingParams
from arealite.utils.weight_transfer import DTYPES

M = TypeVar("M", bound=BaseModel)
_PASSED_ON = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos")
"""Fields of `sampling_params` that are fields of `SamplingParams` too."""


class Body(BaseModel):
    """Strict types and no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class SamplingBody(Body):
    """`sampling_params` of /generate."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    sampling_seed: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (all tokens) or at least 1: got 0. Leave it out to keep all tokens")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must not exceed max_new_tokens: got {self.min_new_tokens} and {self.max_new_tokens}"
            )
        if "" in self.stop:
            raise ValueError("stop must hold non-empty strings: got ''")
        return self

    def to_params(self, next_seed: Callable[[], int]) -> SamplingParams:
        return SamplingParams(
            **{name: getattr(self, name) for name in _PASSED_ON},
            stop_token_ids=tuple(self.stop_token_ids),
            stop=tuple(self.stop),
            seed=next_seed() if self.sampling_seed is None else self.sampling_seed,
        )


class GenerateBody(Body):
    """POST /generate."""

    input_ids: list[int]
    image_data: list[str] = []  # base64; the prompt has one placeholder for each
    sampling_params: SamplingBody = SamplingBody()
    rid: str = Field(default_factory=lambda: uuid.uuid4().hex)
    return_logprob: bool = False
    return_sampling_mask: bool = False  # the ids that each token was sampled from, and logprobs over them
    stream: Literal[False] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        temperature, top_k = self.sampling_params.temperature, self.sampling_params.top_k
        if self.return_sampling_mask and (top_k < 1 or temperature < GREEDY_TEMPERATURE):
            raise ValueError(
                "return_sampling_mask must have a top_k of at least 1 and a temperature above 0: got "
                f"{top_k} and {temperature:g}. Give both, or leave return_sampling_mask out"
            )
        return self


class PauseBody(Body):
    """POST /pause_generation. `in_place` needs a server that allows stale keys and values."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class VerifiedBody(Body):
    """POST /end_weight_update, and how the tensors of any update are verified; SGLang has none of the fields."""

    fingerprints: dict[str, str] | None = None  # the sender's, by tensor (`utils.fingerprint`); None does not verify
    on_mismatch: Literal["refuse", "accept"] = "refuse"  # keep the old weights, or use the new ones
    only_stage: bool = False  # serve the old weights until the next /end_weight_update
    is_partial: bool = False  # tensors that are not sent keep the values of the last update


class DiskUpdateBody(VerifiedBody):
    """POST /update_weights_from_disk. The cache is always flushed, whatever `flush_cache` says."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class JoinGroupBody(Body):
    """POST /init_weights_update_group. SGLang has no `timeout_s`: the deadline of joining, and of each bucket."""

    master_address: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:%\[\]-]+$", max_length=255)]  # torch logs it
    master_port: Annotated[int, Field(gt=0, lt=65536, strict=False)]
    rank_offset: int = Field(ge=1, lt=2**31)
    world_size: int = Field(ge=2, lt=2**31)
    group_name: str
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0


class LeaveGroupBody(Body):
    """POST /destroy_weights_update_group."""

    group_name: str


class BucketBody(Body):
    """POST /update_weights_from_distributed: the next tensors, in order. With several senders `group_name` has the
    group of each tensor, and the tensors of a bucket arrive in parallel; SGLang has one group and bucket per call."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: str | list[str]
    bucket_sizes: list[Annotated[int, Field(ge=1)]] | None = None  # in tensors; None is one bucket
    flush_cache: bool = True
    weight_version: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bucket_sizes is not None and sum(self.bucket_sizes) != len(self.names):
            raise ValueError(f"bucket_sizes must add up to the {len(self.names)} tensors: got {self.bucket_sizes}")
        unknown = [dtype for dtype in self.dtypes if dtype.removeprefix("torch.") not in DTYPES]
        if unknown:
            raise ValueError(f"dtypes must be one of {', '.join(DTYPES)}: got {unknown[0]}")
        return self

    @property
    def groups(self) -> list[str]:
        return self.group_name if isinstance(self.group_name, list) else [self.group_name] * len(self.names)

    @property
    def specs(self) -> list[ParamSpec]:
        return [
            ParamSpec(name, tuple(shape), dtype.removeprefix("torch."))
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True)
        ]


def parse(body_type: type[M], raw: bytes) -> M:
    """Read a JSON body (an empty one is `{}`); ValueError names the first mistake."""
    try:
        return body_type.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where + ': ' if where else ''}{first['msg']}"
        got = "" if first["type"] == "value_error" else f" (got {str(first['input'])[:80]!r})"
        raise ValueError(f"{message}{got}") from error


def reply(request: GenerationRequest, result: GenerationResult) -> dict[str, Any]:
    """Return the reply to /generate."""
    reason = result.finish_reason
    details: dict[str, dict[str, Any]] = {
        "stop": {"matched": reason.matched},
        "length": {"length": len(result.output_ids)},
        "abort": {"message": reason.message},
    }
    return {
        "output_ids": result.output_ids,
        "meta_info": {
            "id": request.rid,
            "finish_reason": {"type": reason.type, **details[reason.type]},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(result.output_ids),
            "weight_version": result.version,
            "weight_versions": [asdict(span) for span in result.version_spans],
            "stale_kv_tokens": result.stale_kv_tokens,
        },
    }

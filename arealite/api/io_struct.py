"""What travels between workflows, engines and servers. Plain data, no behaviour beyond derived properties.

Token lists are Python lists of ints; trajectories are TensorDicts (see `workflow_api`).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from arealite.api.alloc_mode import AllocationMode
from arealite.api.config.data import SaverConfig
from arealite.api.config.rollout import GenerationHyperparameters
from arealite.api.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

StopReason = Literal["stop", "length"]
MAX_LOGPROB = 1e-3
"""What rounding may make of the logprob of a certain token; more is refused."""


@dataclass
class ModelRequest:
    """One completion to sample from a server. Requests with the same `rid` stay on one server.

    `seed_key` says which run of the episode asks. Its sampling seeds then depend on what it asks, and not on the order
    in which the requests of an episode arrive; None: on that order.
    """

    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    image_data: list[str] = field(default_factory=list)
    """Images in base64, in the order of their placeholders in `input_ids`, which has one per token of an image."""
    image_token_id: int | None = None
    """Id of the placeholders."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`seed` is the sampling seed of a request outside of episodes."""
    seed_key: str | None = None


@dataclass
class ModelResponse:
    """A finished completion; the three output lists have one entry per sampled token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    server: str
    """host:port of the server that sampled the last segment."""
    output_kept: list[list[int]] | None = None
    """The ids that each token was sampled from (top_p, top_k, min_p), over which its logprob is; None if the server did
    not return them, or sampled from all."""
    matched_stop: str | None = None
    """The stop string that ended it; its tokens are among the output's."""
    num_interrupts: int = 0
    """How often generation was aborted and continued."""
    latency_s: float = 0.0

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


LLMRequest = VLMRequest = ModelRequest
LLMResponse = VLMResponse = ModelResponse


@dataclass(frozen=True, order=True)
class PromptId:
    """Names one prompt of a run: its pass over the data set and its index in it."""

    epoch: int
    index: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.index}"


@dataclass(frozen=True)
class FinetuneSpec:
    """How long training is, for learning-rate schedules."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    max_steps: int | None = None
    """Steps after which training ends; None trains all epochs."""
    drop_last: bool = True
    """Whether an epoch ends without its last rows that fill no batch."""

    @property
    def steps_per_epoch(self) -> int:
        rounded_up = 0 if self.drop_last else self.train_batch_size - 1
        return max(1, (self.dataset_size + rounded_up) // self.train_batch_size)

    @property
    def total_train_steps(self) -> int:
        return self.max_steps or self.total_train_epochs * self.steps_per_epoch


class ParamSpec(NamedTuple):
    """Name (as in the Hugging Face checkpoint), full shape and dtype of one parameter, and the rank that sends it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    owner: int = 0
    """Rank of the trainer that sends it in an update by broadcast."""

    @property
    def size(self) -> int:
        """Bytes."""
        bytes_per_element = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return math.prod(self.shape) * bytes_per_element


class FrozenWeights(NamedTuple):
    """Weights that training never changes, such as those beside the adapters of LoRA."""

    fingerprint: str
    names: frozenset[str]
    """As in a checkpoint."""


@dataclass
class SaveLoadMeta:
    """Where and how a TrainEngine saves or loads. `weight_format` is Hugging Face safetensors."""

    path: str
    weight_format: Literal["hf"] = "hf"
    with_optim: bool = False
    tokenizer: Any = None
    processor: Any = None
    """Image processor of a model that sees images."""


class WeightSharing(Protocol):
    """A server that samples from tensors of the trainer. Invariant: they change only between `release` and `share`."""

    def share(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Make the server sample from these tensors, named as in a checkpoint, as weights of `version`."""

    def release(self) -> None:
        """Return once the server samples no more, until the next `share`."""


class SendsWeights(Protocol):
    """The part of a TrainEngine that describes the tensors of a weight update."""

    def get_param_specs(self, weight_chunked_mem_mb: int = 1024) -> list[list[ParamSpec]]:
        """Return the buckets of all tensors in send order."""


@dataclass
class WeightTransfer:
    """One weight update, from the receiving engine to the sender, and the sender's answer.

    `uploaded` connects the halves: the sender resolves it (disk: the checkpoint lies at the path; broadcast: the last
    tensor was sent) or fails it with its exception, and the receiver never waits for a sender that has failed.
    """

    version: int = -1
    group_name: str = ""
    """Of the group in which rank 0 sends; `weight_transfer.group_of` names those of other senders."""
    meeting_point: tuple[str, int] = ("127.0.0.1", 0)
    """Address and port of all groups."""
    world_size: int = 0
    """A sender plus the GPUs of all receivers."""
    backend: Literal["nccl", "gloo"] = "gloo"
    is_partial: bool = False
    """Whether every receiver holds what is frozen, which is left out."""
    wants_fingerprints: bool = False
    """Whether the receivers verify what they get."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of each tensor that was sent, if wanted; the sender sets it before it resolves `uploaded`."""
    is_shared: bool = False
    """Whether nothing is sent, as the server is in the sender's process and samples from its own parameters."""
    shares: WeightSharing | None = field(default=None, repr=False, compare=False)
    """That server; None in a pickled copy, for other ranks."""
    uploaded: Future[None] = field(default_factory=Future, repr=False, compare=False)
    """A pickled copy has its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shares": None, "uploaded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, uploaded=Future())


@dataclass
class WeightUpdateMeta:
    """How weights are published, any number of times: the argument of `update_weights` and `upload_weights`."""

    type: Literal["disk", "nccl"]
    version: int | None = None
    """Version that the servers will report; None, or that of the last update, is one more than the rollout's."""
    path: str | None = None
    nccl_param_specs: list[list[ParamSpec]] = field(default_factory=list)
    """Buckets of all tensors in send order."""
    nccl_group_name: str = "update_weight_group"
    """Prefix of the names of broadcast groups."""
    sender_group: str | None = None
    """Broadcast group that the sender is in, "" if it is in none, as one that was started anew; None if unknown."""
    timeout_s: float = 120.0
    holds_requests: bool = False
    """Whether interrupted requests wait for `resume`, and not only until the servers have the weights."""
    only_joining: bool = False
    """Whether this is for servers that lack the newest version, while the others continue."""
    frozen: FrozenWeights | None = None
    """What need not be sent again; None sends every tensor each time."""
    meeting_point: Callable[[str], tuple[str, int, bool]] | None = field(default=None, repr=False, compare=False)
    """Tells, for a host, the address and port at which a sender in another process will listen for it, and whether the
    sender has a GPU; None is this process."""
    transfer: WeightTransfer = field(default_factory=WeightTransfer)
    """The last update; every `update_weights` makes a new one."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "meeting_point": None}

    @classmethod
    def from_disk(cls, saver: SaverConfig, version: int | None = None, timeout_s: float = 120.0) -> WeightUpdateMeta:
        """Send through a checkpoint folder in the run folder, removed once every server has loaded it."""
        return cls("disk", version, path=str(RunFolder(saver).weight_update), timeout_s=timeout_s)

    @classmethod
    def from_fsdp_nccl(
        cls,
        allocation_mode: AllocationMode,
        engine: SendsWeights,
        nccl_group_name: str = "update_weight_group",
        weight_chunked_mem_mb: int = 1024,
        version: int | None = None,
        timeout_s: float = 120.0,
    ) -> WeightUpdateMeta:
        """Send through a broadcast group of trainer rank 0 and the live servers (NCCL; gloo on CPU).

        The group is built from the servers that are alive when it is needed, so the allocation only tells whether
        they can receive at all: pipeline-parallel servers can't (ValueError).
        """
        if allocation_mode.gen_pp_size != 1:
            raise ValueError(
                f"servers that receive weights by broadcast must have p = 1: got {allocation_mode.gen_pp_size}. "
                "Use WeightUpdateMeta.from_disk or an allocation_mode with p1 on the server side."
            )
        specs = engine.get_param_specs(weight_chunked_mem_mb)
        return cls("nccl", version, nccl_param_specs=specs, nccl_group_name=nccl_group_name, timeout_s=timeout_s)


@dataclass
class RolloutStat:
    """Counts of episodes since the run began."""

    submitted: int = 0
    accepted: int = 0
    running: int = 0
    rejected: int = 0
    failed: int = 0

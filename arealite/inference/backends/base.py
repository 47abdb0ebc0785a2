"""What differs between inference servers: what they call things, and what they can do.

A dialect translates and checks, and decides nothing: `generator` decides when a server is asked and what becomes of the
answer, `weight_receiver` when servers pause and get weights. Invariant: nothing of a reply is believed before it was
checked, and one that breaks the protocol becomes a ServerError that names server and endpoint.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from arealite.api.io_struct import ModelRequest, ParamSpec, WeightUpdateMeta
from arealite.inference.http import Json, ServerHttp, StatusError
from arealite.inference.pool import Server, ServerFacts

_UNTOLD = ("default", None)
"""What a server says that has no version."""

Finish = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]


@dataclass(frozen=True)
class Segment:
    """What one reply added to a completion."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """None when the server does not tell."""
    finish: Finish
    stale_kv_tokens: int = 0
    """Tokens sampled on keys and values of older weights than their version says."""

    def kept_in_place(self) -> Segment:
        """Count the tokens after a change of weights as stale: the server went on with the keys and values it had."""
        versions = self.versions or []
        return replace(self, stale_kv_tokens=sum(version != versions[0] for version in versions))


@dataclass(frozen=True)
class BroadcastPlan:
    """The broadcast group of some servers: the sender is rank 0, and the GPUs of the servers follow in order."""

    name: str
    address: str
    port: int
    backend: Literal["nccl", "gloo"]
    servers: tuple[Server, ...]

    @property
    def world_size(self) -> int:
        return 1 + sum(server.facts.num_gpus for server in self.servers)

    def first_rank(self, address: str) -> int:
        """Return the rank of a server's first GPU."""
        before = itertools.takewhile(lambda server: server.address != address, self.servers)
        return 1 + sum(server.facts.num_gpus for server in before)

    def payload(self, address: str) -> Json:
        """Return what a server must know to join."""
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": self.first_rank(address),
            "world_size": self.world_size,
            "group_name": self.name,
            "backend": self.backend,
        }

    def write_to(self, meta: WeightUpdateMeta) -> None:
        """Tell the sender."""
        meta.nccl_group_name = self.name
        meta.nccl_master_address = self.address
        meta.nccl_master_port = self.port
        meta.nccl_world_size = self.world_size
        meta.nccl_backend = self.backend


@dataclass(frozen=True)
class Proof:
    """What the sender says of each tensor, and whether a server takes one that differs."""

    fingerprints: dict[str, str]
    accepts_mismatch: bool


@dataclass(frozen=True)
class Caller:
    """Asks one server, under the deadline of what is under way."""

    address: str
    http: ServerHttp
    remaining_s: Callable[[], float]

    async def get(self, endpoint: str) -> Json:
        """GET an endpoint."""
        return await self.http.get(self.address, endpoint, timeout_s=self.remaining_s())

    async def post(self, endpoint: str, payload: Json | None = None) -> Json:
        """POST a JSON object, an empty one by default."""
        return await self.http.post(self.address, endpoint, payload or {}, timeout_s=self.remaining_s())


def described(specs: list[ParamSpec]) -> Json:
    """Return what a server must know of the tensors of a bucket."""
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def token_versions(spans: list[Json], num_tokens: int, require: Callable[[bool, str], None]) -> list[int] | None:
    """Return the version of each token; None if the server was started without one and has not been told one."""
    versions: list[int] = []
    for span in spans:
        if span["version"] in _UNTOLD:
            return None
        is_sound = span["start"] == len(versions) and str(span["version"]).isdecimal()
        require(is_sound, "have contiguous spans of integer versions")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    require(len(versions) == num_tokens, f"have versions for its {num_tokens} tokens")
    return versions


class Dialect(abc.ABC):
    """How one kind of server is talked to."""

    keeps_old_weights = False
    """Whether a server goes on with its old weights when an update fails half-way."""
    is_on_cpu = False
    """Whether broadcasts reach it by gloo also if the trainer has GPUs."""

    @abc.abstractmethod
    async def meet(self, caller: Caller) -> ServerFacts:
        """Find out what a server is; ServerError if it is of another kind, ConfigError if it can't do enough."""

    @abc.abstractmethod
    async def take_over(self, caller: Caller) -> None:
        """Let a server go on that a run before us may have left paused, or in the middle of an update."""

    @abc.abstractmethod
    def generate_call(
        self, address: str, req: ModelRequest, tokens: list[int], seed: int, *, ignore_eos: bool = False
    ) -> tuple[str, Json]:
        """Return endpoint and payload that let a server continue `req` after `tokens`."""

    @abc.abstractmethod
    def parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        """Check a reply and return what it adds."""

    @abc.abstractmethod
    def is_overflow(self, error: StatusError) -> bool:
        """Tell whether a server refused a request because its context is too short."""

    @abc.abstractmethod
    def verifies(self, meta: WeightUpdateMeta) -> bool:
        """Tell whether servers compare the fingerprints of what they get that way."""

    @abc.abstractmethod
    async def pause(self, caller: Caller) -> None:
        """Stop generating; what becomes of requests in flight is `rollout.pause_mode`."""

    @abc.abstractmethod
    async def resume(self, caller: Caller) -> None:
        """Go on generating."""

    @abc.abstractmethod
    async def load(self, caller: Caller, path: str, version: int, proof: Proof | None) -> list[str]:
        """Take the weights of a folder as `version`, and return the tensors that were taken although they differ."""

    @abc.abstractmethod
    async def join(self, caller: Caller, plan: BroadcastPlan, timeout_s: float) -> None:
        """Join a broadcast group; a server that can bounds joining and each bucket by `timeout_s`."""

    @abc.abstractmethod
    async def leave(self, caller: Caller, plan: BroadcastPlan) -> None:
        """Leave a broadcast group."""

    @abc.abstractmethod
    async def begin(self, caller: Caller) -> bool:
        """Start an update by broadcast; return whether `end` must finish it."""

    @abc.abstractmethod
    async def receive(self, caller: Caller, plan: BroadcastPlan, specs: list[ParamSpec], version: int | None) -> None:
        """Take one bucket from the group; the last one comes with the version."""

    @abc.abstractmethod
    async def end(self, caller: Caller, version: int, proof: Proof | None) -> list[str]:
        """Finish an update by broadcast, and return the tensors that were taken although they differ."""

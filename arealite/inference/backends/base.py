"""What differs between inference servers: endpoints, fields, and what they support. A backend translates and checks;
`completions` and `weight_update` decide. Invariant: every reply is checked before it is used; one that breaks the
protocol becomes a ServerError that names server and endpoint."""

import abc
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeGuard, get_args

from arealite.api.errors import ConfigError, ContextOverflowError, ServerError
from arealite.api.io_struct import MAX_LOGPROB, ModelRequest, ParamSpec
from arealite.api.servers import PauseMode
from arealite.inference.http import Json, ServerConnection, StatusError, bad_reply
from arealite.inference.pool import Server, ServerFacts
from arealite.utils.token_ids import collapse

Finish = Literal["stop", "length", "abort"]
Bucket = Mapping[str, Sequence[ParamSpec]]
"""Tensors that are sent together, by the broadcast group of their sender."""
Part = Literal["weights", "kv_cache"]  # of a server's memory
_PARTS = frozenset[Part](("weights", "kv_cache"))


@dataclass(frozen=True)
class Sent:
    """What servers must hold after an update."""

    fingerprints: Mapping[str, str]  # the sender's, of each tensor (`utils.fingerprint`); empty if nobody verifies
    is_partial: bool = False  # whether they keep tensors of updates before, which were not sent


class MismatchError(ServerError):
    """Tensors did not arrive at a server as they were sent, and it has refused them."""


class ProtocolError(Exception):
    """A reply breaks the protocol; the message is the rule, as in "have finite logprobs"."""


def require(is_right: bool, rule: str) -> None:
    """Raise ProtocolError unless a reply keeps a rule."""
    if not is_right:
        raise ProtocolError(rule)


@dataclass(frozen=True)
class Segment:
    """What one reply added to a completion."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None  # of the weights that sampled each token; None if the server does not report them
    finish: Finish
    stale_kv_tokens: int = 0  # tokens sampled on keys and values of older weights than their version says
    kept: list[list[int]] | None = None  # the ids that each token was sampled from; None if the server has none
    matched_stop: str | None = None  # the stop string that ended it

    @classmethod
    def checked(cls, tokens: Any, logprobs: list[Any], finish: Any, *, max_tokens: int) -> Self:
        """Check what every server must return; versions are still missing."""
        require(type(tokens) is list and set(map(type, tokens)) <= {int}, "have a list of ints as tokens")
        require(min(tokens, default=0) >= 0, "have tokens of at least 0")
        require(len(tokens) <= max_tokens, f"have at most {max_tokens} tokens")
        require(len(logprobs) == len(tokens), f"have {len(tokens)} logprobs, one per token")
        is_finite = set(map(type, logprobs)) <= {float, int} and math.isfinite(sum(logprobs))  # as one by one, but fast
        require(is_finite, "have finite logprobs")
        require(max(logprobs, default=0.0) <= MAX_LOGPROB, "have logprobs of at most 0")
        require(finish in get_args(Finish), "have a finish reason of stop, length or abort")
        return cls(tokens, logprobs, None, finish)

    def with_versions(self, spans: list[Json]) -> Self:
        """Add the version of each token, unless the server has none yet."""
        versions: list[int] = []
        for span in spans:
            if span["version"] in ("default", None):  # a server that was started without one
                return self
            start, end = span["start"], span["end"]
            is_sound = start == len(versions) <= end <= len(self.tokens) and str(span["version"]).isdecimal()
            require(is_sound, "have contiguous spans of integer versions")
            versions += [int(span["version"])] * (end - start)
        require(len(versions) == len(self.tokens), f"have versions for its {len(self.tokens)} tokens")
        return replace(self, versions=versions)

    def with_kept(self, kept: Any) -> Self:
        """Add the ids that each token was sampled from, if the server returned them."""
        if kept is None:
            return self
        require(len(kept) == len(self.tokens), f"have the kept ids of its {len(self.tokens)} tokens")
        ids = list(itertools.chain.from_iterable(kept))
        require(set(map(type, ids)) <= {int} and min(ids, default=0) >= 0, "have kept ids that are ints of at least 0")
        require(all(map(operator.contains, kept, self.tokens)), "have each token among those that it was sampled from")
        return replace(self, kept=kept)

    def with_stop(self, matched: Any) -> Self:
        """Add the stop string that ended it, unless a token did."""
        return replace(self, matched_stop=matched) if isinstance(matched, str) and self.finish == "stop" else self

    def kept_in_place(self) -> Self:
        """Count the tokens after a change of weights as stale: the server kept its keys and values."""
        versions = self.versions or []
        return replace(self, stale_kv_tokens=sum(version != versions[0] for version in versions))


@dataclass(frozen=True)
class BroadcastPlan:
    """Broadcast groups, one for each sender: that is rank 0, and the GPUs of the servers follow in order."""

    name: str
    groups: Mapping[int, str]  # their names, by the rank that sends, in the order in which they form
    address: str
    port: int
    backend: Literal["nccl", "gloo"]
    servers: tuple[Server, ...]

    @property
    def world_size(self) -> int:
        return 1 + sum(server.facts.num_gpus for server in self.servers)

    def bucket_of(self, specs: Sequence[ParamSpec]) -> Bucket:
        """Return what servers receive together."""
        parts = {name: [one for one in specs if one.owner == sender] for sender, name in self.groups.items()}
        return {name: part for name, part in parts.items() if part}

    def place_of(self, address: str, group: str) -> Json:
        """Return what a server needs to join a group."""
        before = itertools.takewhile(lambda server: server.address != address, self.servers)
        return {
            "master_address": self.address,
            "master_port": self.port,
            "rank_offset": 1 + sum(server.facts.num_gpus for server in before),
            "world_size": self.world_size,
            "group_name": group,
            "backend": self.backend,
        }


def described(buckets: Sequence[Bucket]) -> Json:
    """Return names, dtypes, shapes and groups of tensors, and how many of them each bucket has."""
    parts = [(group, spec) for bucket in buckets for group, specs in bucket.items() for spec in specs]
    return {
        "bucket_sizes": [sum(map(len, bucket.values())) for bucket in buckets],
        "names": [spec.name for _, spec in parts],
        "dtypes": [spec.dtype for _, spec in parts],
        "shapes": [list(spec.shape) for _, spec in parts],
        "group_name": [group for group, _ in parts],
    }


def prompt_ids(req: ModelRequest) -> list[int]:
    """Return a prompt with one placeholder per image, which servers expand themselves."""
    if not req.image_data:
        return req.input_ids
    if req.image_token_id is None:
        raise ValueError("a request with image_data must have an image_token_id: got None. Use VisionRLVRWorkflow.")
    return collapse(req.input_ids, len(req.image_data), req.image_token_id)


def are_names(value: object) -> TypeGuard[list[str]]:
    """Tell whether a reply has a list of strings, such as names of tensors, where it must have one."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


class Backend(abc.ABC):
    """The protocol of one kind of server."""

    program: ClassVar[str]  # whose protocol it is
    endpoint: ClassVar[str]  # that generates
    overflow: ClassVar[re.Pattern[str]]  # what a server says that refuses a prompt or completion as too long
    verifies: ClassVar[Set[str]] = frozenset()  # types of weight updates in which servers compare fingerprints
    takes_partial: ClassVar[Set[str]] = frozenset()  # types in which tensors that a server holds may be left out
    receives_at_once = False  # whether a server takes the tensors of several senders at the same time
    stages = False  # whether a server generates with its old weights until `swap`, also after a failed update
    is_on_cpu = False  # whether broadcasts use gloo even if the trainer has GPUs

    def __init__(self, *, pause_mode: PauseMode, accepts_mismatch: bool = False) -> None:
        """`accepts_mismatch`: servers keep tensors that differ from what was sent, where they can verify."""
        self._pause_mode, self._accepts_mismatch = pause_mode, accepts_mismatch
        self._asleep: defaultdict[str, frozenset[Part]] = defaultdict(frozenset)  # by address: what was given back

    async def meet(self, server: ServerConnection) -> ServerFacts:
        """Inspect a server; ServerError if it is of another kind, ConfigError if it lacks what the run needs."""
        try:
            return await self._inspect(server)
        except (StatusError, AttributeError, TypeError, LookupError, ValueError) as error:
            if isinstance(error, ConfigError) or (isinstance(error, StatusError) and error.status != 404):
                raise
            raise ServerError(
                f"http://{server.address} must describe itself as {self.program} does: got {type(error).__name__}: "
                f"{error}. Start it by `arealite serve`, or correct rollout.server_addrs or the backend."
            ) from error

    @abc.abstractmethod
    async def _inspect(self, server: ServerConnection) -> ServerFacts:
        """Do what `meet` does; any other error means that a reply breaks the protocol."""

    def _refuse_cache(self, server: ServerConnection, off: str) -> None:
        """Refuse a prefix cache, which `off` turns off, with `in_place`."""
        if self._pause_mode == "in_place":
            raise ConfigError(
                f"rollout.pause_mode must not be in_place with the prefix cache of {self.program}: got both at "
                f"{server.address}, so that new requests would reuse keys and values of old weights. Start it with "
                f"{off}, or set rollout.pause_mode=retract."
            )

    async def take_over(self, server: ServerConnection) -> None:
        """Resume a server that a previous run may have left paused or mid-update."""
        await self.resume(server)

    async def complete(
        self, server: ServerConnection, req: ModelRequest, tokens: list[int], seed: int, *, ignore_eos: bool = False
    ) -> Segment:
        """Let a server continue `req` after `tokens`; ContextOverflowError if its context is too short."""
        payload = self.payload(server.address, req, tokens, seed, ignore_eos=ignore_eos)
        try:
            reply = await server.request("POST", self.endpoint, payload)
        except StatusError as error:
            if error.status != 400 or not self.overflow.search(str(error)):
                raise
            if tokens:
                return Segment([], [], [], "length")  # an interruption fell on its last tokens
            raise ContextOverflowError(
                f"a request must fit into the context of {server.address}: got {len(req.input_ids)} tokens that "
                f"may become {len(req.input_ids) + req.gconfig.max_new_tokens}. Drop long prompts, lower "
                f"max_new_tokens or serve with a larger context. The server: {error}"
            ) from error
        return self.parse_segment(server.address, reply, req.gconfig.max_new_tokens - len(tokens))

    def parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        """Check a reply and return what it adds."""
        try:
            return self._parse(reply, max_tokens)
        except (ProtocolError, AttributeError, TypeError, LookupError, ValueError) as error:
            rule = str(error) if isinstance(error, ProtocolError) else f"have the fields of {self.program}"
            raise bad_reply(address, self.endpoint, rule, reply) from error

    @abc.abstractmethod
    def payload(self, address: str, req: ModelRequest, tokens: list[int], seed: int, ignore_eos: bool = False) -> Json:
        """Return what makes a server continue `req` after `tokens`."""

    @abc.abstractmethod
    def _parse(self, reply: Json, max_tokens: int) -> Segment:
        """Return what a reply adds; any error means that it breaks the protocol."""

    @abc.abstractmethod
    async def pause(self, server: ServerConnection) -> None:
        """Stop generating; `rollout.pause_mode` decides what becomes of requests in flight."""

    @abc.abstractmethod
    async def resume(self, server: ServerConnection) -> None:
        """Continue generating."""

    @abc.abstractmethod
    async def load(self, server: ServerConnection, path: str, version: int, sent: Sent) -> list[str]:
        """Load the weights of a folder as `version`; return the tensors that are kept although they differ."""

    @abc.abstractmethod
    async def join(self, server: ServerConnection, place: Json, timeout_s: float) -> None:
        """Join a broadcast group; where servers support it, joining and each bucket must end within `timeout_s`."""

    @abc.abstractmethod
    async def leave(self, server: ServerConnection, groups: Sequence[str]) -> None:
        """Leave the broadcast groups of an update."""

    @abc.abstractmethod
    async def begin(self, server: ServerConnection) -> None:
        """Start an update by broadcast, dropping an unfinished one."""

    @abc.abstractmethod
    async def receive(self, server: ServerConnection, buckets: Sequence[Bucket], version: int) -> None:
        """Receive the tensors of `version`, bucket by bucket, in the same order on all servers."""

    @abc.abstractmethod
    async def end(self, server: ServerConnection, version: int, sent: Sent) -> list[str]:
        """Finish an update by broadcast; return the tensors that are kept although they differ."""

    async def sleep(self, server: ServerConnection) -> None:
        """Pause a server and let it give back the memory of its weights and its cache until `reload`."""
        asleep = self._asleep[server.address]
        if asleep and asleep != _PARTS:  # an update has failed between the two
            await self._wake_up(server, "kv_cache")
        if asleep != _PARTS:
            await self._fall_asleep(server)
        self._asleep[server.address] = _PARTS

    async def reload(self, server: ServerConnection, path: str, version: int, sent: Sent) -> list[str]:
        """`load`, for which one that sleeps takes back the memory of its weights, and then that of its cache."""
        if "weights" in self._asleep[server.address]:
            await self._wake_up(server, "weights")
        names = await self.load(server, path, version, sent)
        if "kv_cache" in self._asleep[server.address]:
            await self._wake_up(server, "kv_cache")
        return names

    async def _wake_up(self, server: ServerConnection, part: Part) -> None:
        await self._take_back(server, part)
        self._asleep[server.address] -= {part}  # to take it back twice would end SGLang

    async def _fall_asleep(self, server: ServerConnection) -> None:
        """Pause a server whose memory is all there, and let it give it back."""
        raise NotImplementedError(f"{self.program} must be able to sleep")

    async def _take_back(self, server: ServerConnection, part: Part) -> None:
        """Let a server have a part of its memory again, which holds anything."""
        raise NotImplementedError(f"{self.program} must be able to sleep")

    async def swap(self, server: ServerConnection) -> None:
        """Use the staged weights, where servers stage them."""
        raise NotImplementedError(f"{self.program} must stage weights to swap them: it has them in place")

"""How many servers and trainers a run has, written as one string such as `sglang.d4p1t1+d4p1t1`.

    mode    = servers beside dims | dims beside servers | servers "+eval" | servers | dims
    beside  = "+" | "|"
    servers = backend "." dims, e.g. sglang.d4
    dims    = one or more of d<N> (data), p<N> (pipeline), t<N> or m<N> (tensor), and for trainers c<N> (context) and
              e<N> (expert), each at most once; a missing one is 1

A trainer has d x p x c x t ranks; e is the number of them that share the experts of a layer.

With "+" each side has devices of its own; with "|" both have the same, one in lite.d1|d1. A side that is absent has no
replicas: data size 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from arealite.api.errors import ConfigError
from arealite.api.servers import KINDS
from arealite.utils.terminal import nearest

COLOCATED_BACKEND = "lite"
"""Its server runs in the trainer's process; others on the trainer's devices sleep while it computes."""
_DIMENSIONS = {"d": "data", "p": "pipeline", "t": "tensor", "m": "tensor", "c": "context", "e": "expert"}


_FORMS = {(1, 0, ""), (0, 1, ""), (1, 1, "+"), (1, 0, "+"), (1, 1, "|")}
"""Numbers of servers and trainers, and what stands between the sides."""


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of one side; `data` replicas of `pipeline` x `context` x `tensor` workers each.

    Ranks are numbered with the pipeline stage first, then data, context, and tensor last, so that the ranks of a
    tensor-parallel group are neighbours.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @classmethod
    def from_str(cls, text: str) -> ParallelSizes:
        """Parse sizes such as `d2t2`; ConfigError names what is wrong."""
        return _sizes(text, text)

    @property
    def world_size(self) -> int:
        """Workers of all replicas."""
        return self.data * self.block_size

    @property
    def block_size(self) -> int:
        """Workers of one replica: they compute on the same rows."""
        return self.pipeline * self.context * self.tensor

    def data_rank(self, rank: int) -> int:
        """Return the number of the replica to which a rank belongs."""
        return rank // (self.context * self.tensor) % self.data

    def is_last(self, rank: int) -> bool:
        """Return whether a rank is the last one of its replica, which has the last stage and so sees losses."""
        num_behind = self.world_size - 1 - rank
        return num_behind % (self.context * self.tensor) == 0 and num_behind < self.world_size // self.pipeline

    def __str__(self) -> str:
        more = "".join(f"{letter}{size}" for letter, size in (("c", self.context), ("e", self.expert)) if size > 1)
        return f"d{self.data}p{self.pipeline}t{self.tensor}{more}"


_ABSENT = ParallelSizes(data=0)


@dataclass(frozen=True)
class AllocationMode:
    """A parsed allocation string; `str()` gives its canonical spelling."""

    gen_backend: str | None
    gen: ParallelSizes
    train: ParallelSizes
    beside: str  # "+" or "|", empty without a second side

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Parse an allocation string; ConfigError (a ValueError) names what is wrong."""
        parts = re.split(r"[+|]", text)
        servers = [part for part in parts if "." in part]
        trainers = [part for part in parts if "." not in part and part != "eval"]
        backend = servers[0].partition(".")[0] if servers else None
        if backend is not None and backend not in KINDS:
            _fail(text, f"backend {backend!r}", nearest(backend.lower(), KINDS))
        if kind := next((kind for part in trainers for kind in KINDS if part.startswith(kind)), None):
            _fail(text, f"{kind!r} without a dot and sizes", f"Write e.g. {kind}.d4.")
        gen = _sizes(text, servers[0].partition(".")[2]) if servers else _ABSENT
        train = _sizes(text, trainers[0]) if trainers else _ABSENT
        if gen.context > 1 or gen.expert > 1:
            _fail(text, f"servers of {gen}", "Write c and e behind '+' alone: servers have their own options.")
        beside = "".join(re.findall(r"[+|]", text))
        if (len(servers), len(trainers), beside) not in _FORMS:
            _fail(text, text, "Write e.g. sglang.d4+d4, sglang.d4|d4, sglang.d4+eval, sglang.d4 or d4.")
        if beside == "|" and gen.world_size != train.world_size:
            _fail(text, "other devices", "Write as many on both sides, e.g. sglang.d2|d2, or '+'.")
        if beside == "|" and backend == COLOCATED_BACKEND and gen.world_size > 1:
            _fail(text, "more than one device", "Write lite.d1|d1, or '+' for servers beside the trainer.")
        return cls(backend, gen, train, beside)

    def __str__(self) -> str:
        servers = f"{self.gen_backend}.{self.gen}" if self.gen.data else ""
        trainers = "eval" if self.is_evaluation else str(self.train) if self.train.data else ""
        return f"{servers}{self.beside}{trainers}"

    @property
    def is_evaluation(self) -> bool:
        """Whether a client evaluates the servers, and nothing is trained."""
        return self.beside == "+" and not self.train.data

    @property
    def is_colocated(self) -> bool:
        """Whether the server runs in the trainer's process."""
        return self.beside == "|" and self.gen_backend == COLOCATED_BACKEND

    @property
    def takes_turns(self) -> bool:
        """Whether servers sleep while the trainer computes on their devices."""
        return self.beside == "|" and self.gen_backend != COLOCATED_BACKEND

    @property
    def num_devices(self) -> int:
        """Devices of servers and trainers together."""
        return self.train.world_size + (0 if self.beside == "|" else self.gen.world_size)

    @property
    def gen_dp_size(self) -> int:
        """Number of servers."""
        return self.gen.data

    @property
    def gen_pp_size(self) -> int:
        return self.gen.pipeline

    @property
    def gen_tp_size(self) -> int:
        return self.gen.tensor

    @property
    def gen_instance_size(self) -> int:
        """Devices of one server."""
        return self.gen.pipeline * self.gen.tensor

    @property
    def gen_world_size(self) -> int:
        """Devices of all servers."""
        return self.gen.world_size

    @property
    def train_dp_size(self) -> int:
        return self.train.data

    @property
    def train_pp_size(self) -> int:
        return self.train.pipeline

    @property
    def train_tp_size(self) -> int:
        return self.train.tensor

    @property
    def train_world_size(self) -> int:
        """Devices of the trainer."""
        return self.train.world_size


def _sizes(text: str, part: str) -> ParallelSizes:
    """Parse sizes such as d4p1t1."""
    found = re.findall(r"([dptmce])([1-9][0-9]*)", part)
    sizes = {_DIMENSIONS[letter]: int(size) for letter, size in found}
    if not found or len(sizes) < len(found) or "".join(map("".join, found)) != part:
        change = "Write at least one of d<N> (data), p<N> (pipeline), t<N> or m<N> (tensor), c<N> (context) and e<N> "
        _fail(text, f"sizes {part!r}", f"{change}(expert), each once, N from 1 on.")
    parsed = ParallelSizes(**sizes)
    num_ranks = parsed.world_size // parsed.pipeline
    if num_ranks % parsed.expert or (parsed.expert > 1 and parsed.expert % parsed.tensor):
        change = f"Write an e that divides d x c x t = {num_ranks} and is a multiple of t."
        _fail(text, f"e{parsed.expert} of {part!r}", change)
    return parsed


def _fail(text: str, got: str, change: str) -> NoReturn:
    place = "" if got == text else f" in {text!r}"
    raise ConfigError(f"allocation_mode must be <backend>.<sizes>+<sizes>: got {got}{place}. {change}")

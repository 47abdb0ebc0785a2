"""How many servers and trainers a run has, written as one string such as `sglang.d4p1t1+d4p1t1`.

    mode    = servers beside dims | dims beside servers | servers "+eval" | servers | dims
    beside  = "+" | "|"
    servers = backend "." dims, e.g. sglang.d4
    dims    = one or more of d<N> (data), p<N> (pipeline), t<N> or m<N> (tensor), each at most once; a missing one is 1

With "+" each side has devices of its own; with "|" both have the same, one in lite.d1|d1. The whole string must match;
an error points at the place. A side that is absent has no replicas: data size 0.
"""

from __future__ import annotations

import difflib
import enum
import re
from dataclasses import dataclass
from typing import NoReturn

from arealite.api.errors import ConfigError
from arealite.api.servers import KINDS

COLOCATED_BACKEND = "lite"
"""Its server runs in the trainer's process; others on the trainer's devices sleep while it computes."""
_DIMENSIONS = {"d": "data", "p": "pipeline", "t": "tensor", "m": "tensor"}


class AllocationType(enum.Enum):
    """What the string describes."""

    COLOCATED = "servers on the trainer's devices"
    DECOUPLED_TRAIN = "servers and trainers"
    DECOUPLED_EVAL = "servers and one evaluation client"
    LLM_SERVER_ONLY = "servers"
    TRAIN_ONLY = "trainers"


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of one side; `data` replicas of `pipeline` x `tensor` workers each."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Workers of all replicas."""
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipeline}t{self.tensor}"


_ABSENT = ParallelSizes(data=0)


@dataclass(frozen=True)
class AllocationMode:
    """A parsed allocation string; `str()` gives its canonical spelling."""

    type_: AllocationType
    gen_backend: str | None
    gen: ParallelSizes
    train: ParallelSizes

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Parse an allocation string; ConfigError (a ValueError) points at what is wrong."""
        if not text:
            _fail(text, 0, "nothing", "Write servers and trainers, e.g. sglang.d4p1t1+d4p1t1.")
        if "|" in text:
            return cls._colocated(text, text.index("|"))
        starts = [0, *(plus.end() for plus in re.finditer(r"\+", text))]
        match [_side(text, start, text[start:].partition("+")[0]) for start in starts]:
            case [(None, train)] if train is _ABSENT:
                _fail(text, 0, "eval without servers", "Write servers first, e.g. sglang.d4+eval.")
            case [(None, train)]:
                return cls(AllocationType.TRAIN_ONLY, None, _ABSENT, train)
            case [(backend, gen)]:
                return cls(AllocationType.LLM_SERVER_ONLY, backend, gen, _ABSENT)
            case [(str(backend), gen), (None, train)] | [(None, train), (str(backend), gen)]:
                type_ = AllocationType.DECOUPLED_EVAL if train is _ABSENT else AllocationType.DECOUPLED_TRAIN
                return cls(type_, backend, gen, train)
            case [(None, _), (None, _)]:
                names = ", ".join(KINDS)
                _fail(text, 0, "no servers", f"Put a backend ({names}) and a dot before one side, e.g. sglang.d4+d4.")
            case [_, _]:
                _fail(text, starts[1], "servers on both sides", "Name a backend on one side only.")
            case _:
                _fail(text, starts[2] - 1, "a second '+'", "Write at most two sides.")

    @classmethod
    def _colocated(cls, text: str, at: int) -> AllocationMode:
        """Parse sides that share a device, with `|` at a place."""
        match _side(text, 0, text[:at]), _side(text, at + 1, text[at + 1 :]):
            case ((str(backend), gen), (None, train)) | ((None, train), (str(backend), gen)) if train is not _ABSENT:
                if backend == COLOCATED_BACKEND and (gen.world_size, train.world_size) != (1, 1):
                    _fail(text, at, "more than one device", "Write lite.d1|d1, or '+' for servers beside the trainer.")
                if gen.world_size != train.world_size:
                    _fail(text, at, "other devices", "Write as many on both sides, e.g. sglang.d2|d2, or '+'.")
                return cls(AllocationType.COLOCATED, backend, gen, train)
        _fail(text, at, "'|' without a server and a trainer", "Write lite.d1|d1.")

    def __str__(self) -> str:
        servers = f"{self.gen_backend}.{self.gen}" if self.gen.data else ""
        client = "eval" if self.type_ is AllocationType.DECOUPLED_EVAL else ""
        trainers = str(self.train) if self.train.data else client
        beside = "|" if self.type_ is AllocationType.COLOCATED else "+"
        return beside.join(filter(None, (servers, trainers)))

    @property
    def is_colocated(self) -> bool:
        """Whether the server runs in the trainer's process."""
        return self.type_ is AllocationType.COLOCATED and self.gen_backend == COLOCATED_BACKEND

    @property
    def takes_turns(self) -> bool:
        """Whether servers sleep while the trainer computes on their devices."""
        return self.type_ is AllocationType.COLOCATED and self.gen_backend != COLOCATED_BACKEND

    @property
    def num_devices(self) -> int:
        """Devices of servers and trainers together."""
        return self.train.world_size + (0 if self.type_ is AllocationType.COLOCATED else self.gen.world_size)

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


def _side(text: str, start: int, part: str) -> tuple[str | None, ParallelSizes]:
    """Parse `eval`, whose sizes are absent, `<backend>.<dims>` or `<dims>`."""
    if part == "eval":
        return None, _ABSENT
    backend, dot, dims = part.partition(".") if "." in part else ("", "", part)
    if dot and backend not in KINDS:
        near = difflib.get_close_matches(backend.lower(), KINDS, n=1)
        change = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(KINDS)}."
        _fail(text, start, f"backend {backend!r}", change)
    if not dot and (kind := next(filter(part.startswith, KINDS), None)):
        _fail(text, start + len(kind), f"{kind!r} without a dot and sizes", f"Write e.g. {kind}.d4.")
    start += len(backend + dot)
    sizes, end = dict[str, int](), 0
    while size := re.compile(r"([dptm])([1-9][0-9]*)").match(dims, end):
        name = _DIMENSIONS[size[1]]
        if name in sizes:
            _fail(text, start + end, f"the {name} size twice", f"Remove one of them (m is another name of t): {dims}")
        sizes[name], end = int(size[2]), size.end()
    if end < len(dims):
        if dims[end] in _DIMENSIONS:
            _fail(text, start + end + 1, f"{dims[end]!r} without a number", f"Write one from 1 on, e.g. {dims[end]}1.")
        change = "Only d<N> (data), p<N> (pipeline) and t<N> (tensor) may stand here."
        _fail(text, start + end, repr(dims[end]), change)
    if not sizes:
        _fail(text, start, "no sizes", "Write at least one of d<N>, p<N>, t<N>, e.g. d4.")
    return backend or None, ParallelSizes(**sizes)


def _fail(text: str, position: int, got: str, change: str) -> NoReturn:
    """Raise with a caret under the place."""
    raise ConfigError(
        f"allocation_mode must be <backend>.<sizes>+<sizes>: got {got}. {change}\n    {text}\n    {' ' * position}^"
    )

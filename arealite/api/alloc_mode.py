"""How many servers and trainers a run has, written as one string such as `sglang.d4p1t1+d4p1t1`.

    mode    = servers "+" dims | dims "+" servers | servers "+eval" | servers | dims
    servers = backend "." dims, e.g. sglang.d4
    dims    = one or more of d<N> (data), p<N> (pipeline), t<N> or m<N> (tensor), each at most once; a missing one is 1

The whole string must match; an error points at the place. A side that is absent has no replicas: data size 0.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from arealite.api.errors import ConfigError
from arealite.api.server_limits import BACKENDS

_DIMENSIONS = {"d": "data", "p": "pipeline", "t": "tensor", "m": "tensor"}
_DIGITS = "0123456789"


class AllocationType(enum.Enum):
    """What the string describes."""

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
        return prod((self.data, self.pipeline, self.tensor))

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
        return _parse(text)

    def __str__(self) -> str:
        servers = f"{self.gen_backend}.{self.gen}"
        return {
            AllocationType.DECOUPLED_TRAIN: f"{servers}+{self.train}",
            AllocationType.DECOUPLED_EVAL: f"{servers}+eval",
            AllocationType.LLM_SERVER_ONLY: servers,
            AllocationType.TRAIN_ONLY: str(self.train),
        }[self.type_]

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


@dataclass(frozen=True)
class _Side:
    """One side of the `+`: servers if it has a backend, an evaluation client if it has no sizes."""

    start: int
    backend: str | None
    sizes: ParallelSizes | None


def _parse(text: str) -> AllocationMode:
    """Split at `+` and decide which side is which."""
    if not text:
        _fail(text, 0, "nothing", "Write servers and trainers, e.g. sglang.d4p1t1+d4p1t1.")
    if "|" in text:
        _fail(text, text.index("|"), "'|'", "It is reserved for sharing devices, which does not exist yet. Use '+'.")
    first, *others = _sides(text)
    if len(others) > 1:
        _fail(text, others[1].start - 1, "a second '+'", "Write at most two sides.")
    second = others[0] if others else None
    if second is not None and second.backend is not None:
        if first.backend is not None:
            _fail(text, second.start, "servers on both sides", "Name a backend on one side only.")
        first, second = second, first
    if second is None:
        return _alone(text, first)
    if first.backend is None or first.sizes is None:
        names = ", ".join(BACKENDS)
        _fail(text, 0, "no servers", f"Put a backend ({names}) and a dot before one side, e.g. sglang.d4+d4.")
    if second.sizes is None:
        return AllocationMode(AllocationType.DECOUPLED_EVAL, first.backend, first.sizes, _ABSENT)
    return AllocationMode(AllocationType.DECOUPLED_TRAIN, first.backend, first.sizes, second.sizes)


def _alone(text: str, side: _Side) -> AllocationMode:
    """Return the mode of a string without `+`."""
    if side.sizes is None:
        _fail(text, side.start, "eval without servers", "Write servers first, e.g. sglang.d4+eval.")
    if side.backend is None:
        return AllocationMode(AllocationType.TRAIN_ONLY, None, _ABSENT, side.sizes)
    return AllocationMode(AllocationType.LLM_SERVER_ONLY, side.backend, side.sizes, _ABSENT)


def _sides(text: str) -> list[_Side]:
    """Parse what stands between the `+` signs."""
    sides, start = [], 0
    for part in text.split("+"):
        sides.append(_side(text, start, part))
        start += len(part) + 1
    return sides


def _side(text: str, start: int, part: str) -> _Side:
    """Parse `eval`, `<backend>.<dims>` or `<dims>`."""
    if part == "eval":
        return _Side(start, None, None)
    backend, dot, dims = part.partition(".")
    if not dot:
        _refuse_undotted_backend(text, start, part)
        return _Side(start, None, _sizes(text, start, part))
    if backend not in BACKENDS:
        near = difflib.get_close_matches(backend.lower(), BACKENDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(BACKENDS)}."
        _fail(text, start, f"backend {backend!r}", hint)
    return _Side(start, backend, _sizes(text, start + len(backend) + 1, dims))


def _refuse_undotted_backend(text: str, start: int, part: str) -> None:
    """Explain `sglang`, `sglangd4` and `sglang:d4` better than as unknown letters."""
    for backend in BACKENDS:
        if part.startswith(backend):
            at = start + len(backend)
            _fail(text, at, f"{backend!r} without a dot and sizes", f"Write e.g. {backend}.d4.")


def _sizes(text: str, start: int, dims: str) -> ParallelSizes:
    """Parse `d4p1t1` and its permutations."""
    sizes: dict[str, int] = {}
    position, end = start, start + len(dims)
    if not dims:
        _fail(text, start, "no sizes", "Write at least one of d<N>, p<N>, t<N>, e.g. d4.")
    while position < end:
        letter = text[position]
        name = _dimension(text, position)
        if name in sizes:
            _fail(text, position, f"the {name} size twice", f"Remove one of them (m is another name of t): {dims}")
        digits_end = position + 1
        while digits_end < end and text[digits_end] in _DIGITS:
            digits_end += 1
        digits = text[position + 1 : digits_end]
        if not digits or digits.startswith("0"):
            got = f"{letter}{digits}" if digits else f"{letter!r} without a number"
            _fail(text, position + 1, got, f"Write a number from 1 on after {letter}, e.g. {letter}1.")
        sizes[name] = int(digits)
        position = digits_end
    return ParallelSizes(**sizes)


def _dimension(text: str, position: int) -> str:
    """Return the dimension that the letter names."""
    letter = text[position]
    if letter in _DIMENSIONS:
        return _DIMENSIONS[letter]
    if letter.lower() in _DIMENSIONS:
        _fail(text, position, repr(letter), f"Write {letter.lower()!r} in lower case.")
    _fail(text, position, repr(letter), "Only d<N> (data), p<N> (pipeline) and t<N> (tensor) may stand here.")


def _fail(text: str, position: int, got: str, change: str) -> NoReturn:
    """Raise with a caret under the place."""
    raise ConfigError(
        f"allocation_mode must be <backend>.<sizes>+<sizes>: got {got}. {change}\n    {text}\n    {' ' * position}^"
    )

"""Batches whose tensors lie in Ray's object store, cut once into parts and moved by pieces.

A piece is one object: some keys of one part, as numpy arrays of the real tokens (numpy crosses the store without a
copy; a TensorDict would be pickled). Invariants: a part is never cut again, so that a group of as many ranks as there
are parts gets the shares of a script of ranks; what is restored has the real tokens and the width of what was sent, so
sums keep their order, and the usual padding (-1 in `versions`, else 0). Pieces are copied when they are restored:
arrays of the store belong to every reader.
"""

# B rows of a part, S padded tokens, N real tokens

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from arealite.utils.tensors import ABSENT, RAGGED, concat_padded_tensors, real_entries

_MASK = "attention_mask"
_BITS = {torch.bfloat16: torch.int16}  # types that numpy lacks travel as others of their size


@dataclass(frozen=True)
class _Array:
    """A tensor on its way: `[N, ...]` of the real entries of `width` padded ones, or all of it if that is None."""

    values: np.ndarray[Any, Any]
    dtype: torch.dtype
    width: int | None


Piece = dict[str, _Array]


def pack(part: TensorDict, keys: Iterable[str]) -> Piece:
    """Return some keys of a part, which has its `attention_mask`, without padding."""
    piece = {}
    for key in keys:
        tensor = part[key].detach().cpu()
        real = None if key == _MASK else real_entries(part, key)
        array = _bits(tensor)
        array = np.ascontiguousarray(array) if real is None else array[real.cpu().numpy()]
        piece[key] = _Array(array, tensor.dtype, None if real is None else tensor.shape[1])
    return piece


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as an array; numpy takes and sets entries by a mask thirty times as fast as torch."""
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def unpack(arrays: Mapping[str, _Array]) -> TensorDict:
    """Return the part that pieces of it hold; the caller may change it."""
    part: dict[str, torch.Tensor] = {}
    for key in sorted(arrays, key=lambda key: (key != _MASK, key in RAGGED)):  # a key after what tells where it is real
        array = arrays[key]
        if array.width is None:
            part[key] = torch.from_numpy(np.array(array.values)).view(array.dtype)
        else:
            num_rows = part[_MASK].shape[0]
            padded = torch.full((num_rows, array.width, *array.values.shape[1:]), ABSENT.get(key, 0), dtype=array.dtype)
            sized = TensorDict(part | {key: padded}, batch_size=[num_rows])
            real = real_entries(sized, key)
            assert real is not None, f"{key} had padding"
            _bits(padded)[real.numpy()] = array.values
            part[key] = padded
    return TensorDict(part, batch_size=[part[_MASK].shape[0]])


def restored(layout: Collection[Mapping[str, str]], parts: Iterable[Sequence[Piece]]) -> list[TensorDict]:
    """Return parts of a batch, each from its pieces, whose keys `layout` has by their names in the batch."""
    return [
        unpack({name: piece[key] for names, piece in zip(layout, part) for name, key in names.items()})
        for part in parts
    ]


def join(parts: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of several parts as one batch."""
    return parts[0] if len(parts) == 1 else concat_padded_tensors(parts)


def cut(batch: TensorDict, parts: Sequence[TensorDict], keys: Iterable[str]) -> list[TensorDict]:
    """Return for each part its rows of some keys of the joined batch, with the part's own padding and mask.

    With a key of `RAGGED` come its counts, which tell what of it is real.
    """
    keys = with_counts(keys)
    cuts, first, joined_width = [], 0, batch[_MASK].shape[1]
    for part in parts:
        num_rows, width = part[_MASK].shape
        rows = batch[first : first + num_rows]
        first += num_rows
        of_part = {
            key: rows[key][:, :width] if rows[key].shape[1:2] == (joined_width,) and key not in RAGGED else rows[key]
            for key in keys
        }
        cuts.append(TensorDict(of_part | {_MASK: part[_MASK]}, batch_size=[num_rows]))
    return cuts


def with_counts(keys: Iterable[str]) -> list[str]:
    """Return keys, and those without which they can't be restored."""
    return list(dict.fromkeys(one for key in keys for one in (key, RAGGED.get(key, key))))


CHANGED = threading.Condition()
"""Guards pieces and what groups have to do; whoever changes either wakes all that wait for it."""


class Pieces:
    """References to the piece of each part, once they are there; those of a node that died are made again."""

    def __init__(self, references: list[Any] | None = None, *, make_again: Callable[[Pieces], None] | None = None):
        """`make_again` reaches the maker of lost pieces; without one, pieces are the master's own."""
        self._references, self._make_again = references, make_again
        self._error: BaseException | None = None

    def is_settled(self) -> bool:
        return self._references is not None or self._error is not None

    def settle(self, references: list[Any] | None, error: BaseException | None = None) -> None:
        """Set the references, or why there are none."""
        with CHANGED:
            self._references, self._error = references, error
            CHANGED.notify_all()

    def result(self) -> list[Any]:
        """Return the references, or raise why there are none; the group that makes them has deadlines."""
        with CHANGED:
            CHANGED.wait_for(self.is_settled)
            if self._error is not None:
                raise self._error
            assert self._references is not None
            return self._references

    def report_lost(self, name: str) -> None:
        """Let pieces be made again if `name`, Ray's of a lost object, is one of them."""
        with CHANGED:
            if self._make_again is None or name not in [one.hex() for one in self._references or ()]:
                return
            self._references = None
            self._make_again(self)


@dataclass(frozen=True)
class Column:
    """One key of a batch: the piece of each part, and the key's name in them."""

    pieces: Pieces
    key: str
    outcomes: Future[list[Any]] | None = None
    """Tell whether the key was made, once the pieces are there; None for one that must be."""

    def exists(self) -> bool:
        """Wait for the call that makes the column, and tell whether it has."""
        return self.outcomes is None or self.key in self.outcomes.result()[0].made


class RemoteBatch(UserDict[str, Column]):
    """A batch of a master. A call that makes a column returns at once; what needs it waits for it."""

    def __init__(self, order: Sequence[Sequence[int]]) -> None:
        """`order` has the rows of each part by their places in the whole batch."""
        super().__init__()
        self.order = order
        self.metrics: Mapping[str, float] = {}  # of the workflow, whose columns the calls of a graph don't name

    @property
    def num_parts(self) -> int:
        return len(self.order)

    def select(self, keys: Sequence[str] = ()) -> RemoteBatch:
        """Return the columns of `keys` that there are, with those that restore them; without keys all."""
        wanted = with_counts([_MASK, *keys]) if keys else list(self)
        selected = RemoteBatch(self.order)
        selected.update({key: self[key] for key in wanted if key in self})
        return selected

    def layout(self) -> dict[Pieces, dict[str, str]]:
        """Return the columns that exist by the pieces where they lie: the keys there by their names here."""
        found: dict[Pieces, dict[str, str]] = {}
        for name, column in self.items():
            if column.exists():
                found.setdefault(column.pieces, {})[name] = column.key
        return found

    def __setitem__(self, key: str, column: Column) -> None:
        if not isinstance(column, Column):
            raise TypeError(
                f"a column of a remote batch must come from a call of an engine: got {type(column).__name__} for "
                f"{key!r}. Compute it in a function f(engine, batch) and pass that to engine.call."
            )
        super().__setitem__(key, column)

    def __missing__(self, key: str) -> Column:
        raise KeyError(f"a batch must have {key!r}: got {sorted(self)}")

"""Batches whose tensors are in Ray's object store, split once into parts and moved as pieces.

A piece is one object of the store: some keys of one part, packed. Invariants: a part is never split again, so a group
with as many blocks as parts (a block is a rank, or the ranks that divide one copy of the model) computes on the shares
of a script with that many blocks; a restored part has the tokens and the width of the original, so sums keep their
order.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError
from tensordict import TensorDict

from arealite.api.errors import GroupLostError
from arealite.utils.packed import Piece, join, unpack
from arealite.utils.tensors import RAGGED, TOKENS, concat_padded_tensors

_MASK = "attention_mask"


def restored(layout: Collection[Mapping[str, str]], parts: Iterable[Sequence[Piece]]) -> list[TensorDict]:
    """Return parts of a batch, each from its pieces; `layout` maps names in the batch to keys of each piece."""
    return [
        unpack({name: piece[key] for names, piece in zip(layout, part) for name, key in names.items()})
        for part in parts
    ]


@dataclass(frozen=True)
class Share:
    """A piece of a part whose rows are where rollout workers put them, one piece per group."""

    head: Piece
    groups: Sequence[Any]  # references


def whole(piece: Piece | Share) -> Piece:
    """Return the piece, after fetching the rows of a share."""
    return join([piece.head, *rows_at(piece.groups)]) if isinstance(piece, Share) else piece


def rows_at(references: Sequence[Any]) -> list[Any]:
    """Return what rollout workers put into the store. Raises GroupLostError if a node died with it."""
    try:
        return list(ray.get(list(references)))
    except ObjectLostError as error:
        raise GroupLostError(
            "rows of episodes must stay in Ray's store until they are trained and written: got a loss of a node. "
            "Resume the run from its checkpoint, which issues their prompts again."
        ) from error


def joined(parts: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of several parts as one batch."""
    return parts[0] if len(parts) == 1 else concat_padded_tensors(parts)


def cut(batch: TensorDict, parts: Sequence[TensorDict], keys: Iterable[str]) -> list[TensorDict]:
    """Split some keys of the joined batch into parts again, with the padding and mask of each part.

    A key of `RAGGED` includes its counts.
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


def by_need(keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the keys of tokens that models read, and the others, which few calls need."""
    tokens = [key for key in TOKENS if key in {*keys}]
    return tokens, sorted({*keys} - {*tokens})


def with_counts(keys: Iterable[str]) -> list[str]:
    """Return keys together with the counts that are needed to restore ragged keys."""
    return list(dict.fromkeys(name for key in keys for name in (key, RAGGED.get(key, key))))


CHANGED = threading.Condition()
"""Guards pieces and the task lists of groups. Notify after every change."""


class Pieces:
    """References to the piece of each part, once computed; pieces lost with a node are recomputed."""

    def __init__(self, references: list[Any] | None = None, *, make_again: Callable[[Pieces], None] | None = None):
        """`make_again` asks the group that made the pieces to recompute them; the master's own pieces have none."""
        self._references, self._make_again = references, make_again
        self._error: BaseException | None = None

    def is_settled(self) -> bool:
        return self._references is not None or self._error is not None

    def settle(self, references: list[Any] | None, error: BaseException | None = None) -> None:
        """Set the references, or the error that replaces them."""
        with CHANGED:
            self._references, self._error = references, error
            CHANGED.notify_all()

    def result(self) -> list[Any]:
        """Wait for the references and return them, or raise the error; the group that makes them has deadlines."""
        with CHANGED:
            CHANGED.wait_for(self.is_settled)
            if self._error is not None:
                raise self._error
            assert self._references is not None
            return self._references

    def report_lost(self, name: str) -> None:
        """Have the pieces recomputed if the lost object `name` (Ray's) is among them."""
        with CHANGED:
            if self._make_again is None or name not in [piece.hex() for piece in self._references or ()]:
                return
            self._references = None
            self._make_again(self)


@dataclass(frozen=True)
class Column:
    """A key of a batch: the piece of each part, and the key's name in the pieces."""

    pieces: Pieces
    key: str
    outcomes: Future[list[Any]] | None = None
    """Outcomes that list the keys that were made, for an optional key; None for a required key."""

    def exists(self) -> bool:
        """Wait for the call that makes the column; return False if it did not make it."""
        return self.outcomes is None or self.key in self.outcomes.result()[0].made


class RemoteBatch(UserDict[str, Column]):
    """A batch in the master. A call that makes a column returns at once; readers of the column wait."""

    def __init__(self, order: Sequence[Sequence[int]]) -> None:
        """`order` lists the rows of the whole batch that each part holds."""
        super().__init__()
        self.order = order
        self.metrics: Mapping[str, float] = {}  # the workflow's metrics: no call of a graph names their columns

    @property
    def num_parts(self) -> int:
        return len(self.order)

    def select(self, keys: Sequence[str] = ()) -> RemoteBatch:
        """Return the existing columns of `keys`, with the columns needed to restore them; without keys, all."""
        wanted = with_counts([_MASK, *keys]) if keys else list(self)
        selected = RemoteBatch(self.order)
        selected.update({key: self[key] for key in wanted if key in self})
        return selected

    def layout(self) -> dict[Pieces, dict[str, str]]:
        """Return for each `Pieces` of the batch the names of its existing columns, mapped to keys of the pieces."""
        layout: dict[Pieces, dict[str, str]] = {}
        for name, column in self.items():
            if column.exists():
                layout.setdefault(column.pieces, {})[name] = column.key
        return layout

    def __setitem__(self, key: str, column: Column) -> None:
        if not isinstance(column, Column):
            raise TypeError(
                f"a column of a remote batch must come from a call of an engine: got {type(column).__name__} for "
                f"{key!r}. Compute it in a function f(engine, batch) and pass that to engine.call."
            )
        super().__setitem__(key, column)

    def __missing__(self, key: str) -> Column:
        raise KeyError(f"a batch must have {key!r}: got {sorted(self)}")


def fetch(column: Column, batch: RemoteBatch) -> torch.Tensor:
    """Return a column as a tensor of the whole batch, with rows in the order before scattering."""
    columns = batch.select([column.key])
    columns[column.key] = column
    layout = columns.layout()
    parts = restored(layout.values(), zip(*map(_fetched, layout)))
    rows = torch.tensor([row for part in batch.order for row in part], dtype=torch.long)
    return joined(parts)[column.key][rows.argsort()]


def _fetched(pieces: Pieces) -> list[Any]:
    """Return the pieces; those lost with a node are recomputed."""
    while True:
        references = pieces.result()
        try:
            return [whole(piece) for piece in ray.get(references)]
        except ObjectLostError as error:
            pieces.report_lost(error.object_ref_hex)

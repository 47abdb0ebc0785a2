"""Batches on their way to other processes: the real entries of each key as a numpy array, and how to restore them.

numpy is read from Ray's object store without a copy; a TensorDict would be pickled. Invariant: what is restored has the
entries of the original and the usual padding (-1 in `versions`, else 0), and is a copy, as all readers share a store.
"""

# B rows, S padded tokens, N real entries; L padded entries of a ragged key

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from arealite.utils.tensors import ABSENT, RAGGED, concat_padded_tensors, is_per_token, real_entries

_MASK = "attention_mask"
_BITS = {torch.bfloat16: torch.int16}  # numpy lacks the type: send its bits


@dataclass(frozen=True)
class _Array:
    """A packed tensor: the real entries `[N, ...]` of rows padded to `width`, or the whole tensor if that is None."""

    values: np.ndarray[Any, Any]
    dtype: torch.dtype
    width: int | None


Piece = dict[str, _Array]


def layout_of(batches: Sequence[TensorDict]) -> TensorDict:
    """Return keys and dtypes of the joined batches without rows; keys of tokens or ragged ones have the width 0.

    A key of any other width is no key of tokens, also if a batch happens to be as wide.
    """
    layout = concat_padded_tensors([one[:0] for one in batches])
    for key in set(layout.keys()):
        if key in RAGGED or all(is_per_token(key, one[key], one[_MASK].shape[1]) for one in batches):
            layout[key] = layout[key][:, :0]
    return layout


def pack(part: TensorDict, keys: Iterable[str], layout: TensorDict | None = None) -> Piece:
    """Return some keys of a part, which has its `attention_mask`, without padding.

    With the `layout` of a larger batch, keys have the types that they have there, and are as wide as their longest row.
    """
    piece = {}
    for key in keys:
        tensor = part[key].detach().cpu() if layout is None else part[key].to(layout[key].dtype)
        is_whole = key == _MASK or (layout is not None and layout[key].shape[1:2] != (0,))
        real = None if is_whole else real_entries(part, key)
        array = _bits(tensor)
        if real is None:
            piece[key] = _Array(np.ascontiguousarray(array), tensor.dtype, None)
        else:
            width = tensor.shape[1] if layout is None else _width(real)
            piece[key] = _Array(array[real.cpu().numpy()], tensor.dtype, width)
    return piece


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory as an array: numpy indexes by a mask thirty times as fast as torch."""
    return tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy()


def _width(real: torch.Tensor) -> int:
    """Return the number of entries `[B, L]` up to the last real one of any row."""
    return 1 + int(np.flatnonzero(real.any(dim=0).numpy()).max(initial=-1))


def longest_row(batch: TensorDict) -> int:
    """Return the width that the rows of a batch need."""
    return _width(batch[_MASK].bool())


def head_of(layout: TensorDict, widths: Iterable[int]) -> Piece:
    """Return the first piece, without rows, for `join` to make rows as wide as the longest of some, and at least 1."""
    width = max([1, *widths])
    taken = {tensor.shape[1] for tensor in layout.values() if tensor.ndim > 1}  # a key that wide would look like tokens
    while width in taken:
        width += 1
    head = pack(layout, layout.keys(), layout)
    return head | {_MASK: replace(head[_MASK], values=head[_MASK].values.repeat(width).reshape(0, width))}


def join(pieces: Sequence[Piece]) -> Piece:
    """Return the rows of pieces with the same keys, among them the mask, one below the other.

    The first piece decides which keys are those of tokens, and how wide they are.
    """
    joined, length = {}, pieces[0][_MASK].values.shape[1]
    for key, first in pieces[0].items():
        if first.width is None:
            arrays = [piece[key].values for piece in pieces]
            values = _stacked(arrays, ABSENT.get(key, 0), length if key == _MASK else None)
            joined[key] = _Array(values, first.dtype, None)
        else:
            width = max(piece[key].width or 0 for piece in pieces) if key in RAGGED else length
            joined[key] = _Array(np.concatenate([_real(piece, key) for piece in pieces]), first.dtype, width)
    return joined


def _real(piece: Piece, key: str) -> np.ndarray[Any, Any]:
    """Return the real entries of a key of tokens, also of one that was packed whole."""
    array = piece[key]
    return array.values if array.width is not None else array.values[piece[_MASK].values.astype(bool)]


def _stacked(values: Sequence[np.ndarray[Any, Any]], fill: int, width: int | None) -> np.ndarray[Any, Any]:
    """Return arrays one below the other, padded or cut to `width`, by default to the widest."""
    if values[0].ndim < 2:
        return np.concatenate(values)
    width, ends = width or max(one.shape[1] for one in values), np.cumsum([len(one) for one in values])
    stacked = np.full((ends[-1], width, *values[0].shape[2:]), fill, values[0].dtype)
    for one, end in zip(values, ends):
        stacked[end - len(one) : end, : one.shape[1]] = one[:, :width]
    return stacked


def unpack(piece: Piece) -> TensorDict:
    """Return the rows of a piece as a copy."""
    part: dict[str, torch.Tensor] = {}
    for key in sorted(piece, key=lambda key: (key != _MASK, key in RAGGED)):  # counts before ragged keys
        array = piece[key]
        if array.width is None:
            part[key] = torch.from_numpy(np.array(array.values)).view(array.dtype)
        else:
            num_rows = part[_MASK].shape[0]
            padded = torch.full((num_rows, array.width, *array.values.shape[1:]), ABSENT.get(key, 0), dtype=array.dtype)
            real = real_entries(TensorDict(part | {key: padded}, batch_size=[num_rows]), key)
            assert real is not None, f"{key} had padding"
            _bits(padded)[real.numpy()] = array.values
            part[key] = padded
    return TensorDict({key: part[key] for key in piece}, batch_size=[part[_MASK].shape[0]])

"""A number that tells whether two copies of a tensor have the same bits in the same places.

    fingerprint = sum over i of weight(i) * element(i)   mod 2^64

Elements are the tensor's bits read as integers; weights are odd and pseudo-random. So a change of one element always
shows, several cancel out (an exchange included) with a chance of 2^-33 or less, and parts of a tensor can be summed in
any order, on any device, or on several ranks. It guards against mistakes, not against malice: it is no signature.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import numpy as np
import torch

_BLOCK = 2**18
"""Weights repeat after so many elements, times a power of `_FACTOR`; also what is computed at once."""
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By bytes of an element. Those of 8 bytes count as two, or flips of two sign bits would cancel out."""


@torch.no_grad()
def fingerprint(tensor: torch.Tensor, offset: int = 0) -> int:
    """Return the fingerprint, less than 2^64, of a tensor, or its summand for a part that begins at element `offset`.

    The sum of the fingerprints of all parts, mod 2^64, is that of the whole.
    """
    elements = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    offset *= max(1, tensor.element_size() // 4)
    weights = _weights(tensor.device)
    sums, factors = [], []
    for block in range(offset // _BLOCK, -(-(offset + elements.numel()) // _BLOCK)):
        start, end = max(block * _BLOCK, offset), min((block + 1) * _BLOCK, offset + elements.numel())
        here = slice(start - block * _BLOCK, end - block * _BLOCK)
        sums.append((weights[here] * elements[start - offset : end - offset]).sum())
        factors.append(pow(_FACTOR, block, 2**64))
    values = torch.stack(sums).tolist() if sums else []
    return sum(factor * value for factor, value in zip(factors, values, strict=True)) & _MASK


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the fingerprint of each tensor as 16 hexadecimal digits."""
    return {name: f"{fingerprint(tensor):016x}" for name, tensor in tensors.items()}


def mismatched(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str]) -> list[str]:
    """Name the tensors that are not what `fingerprints` said, those that only one side has included."""
    return differing(fingerprints(tensors), expected)


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Name the tensors whose fingerprints differ, those that only one side has included."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def model_fingerprint(tensors: Mapping[str, int]) -> str:
    """Join the fingerprints of named tensors into one for a whole model."""
    lines = (f"{name} {value & _MASK:016x}\n" for name, value in sorted(tensors.items()))
    return hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return the weights of the first block: splitmix64 of their index, made odd."""
    state = (np.arange(1, _BLOCK + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64)).to(device)

"""A checksum of a tensor's bits that parts of it, on any device or rank, add up to.

    fingerprint = sum over i of factor(i) * element(i)   mod 2^64

Elements are the bits read as integers; factors are odd and pseudo-random. A change of one element always shows, several
(an exchange included) cancel with a chance of at most 2^-33. It detects mistakes and is no signature.
"""

import functools
import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from arealite.utils.seeding import splitmix64

_BLOCK = 2**18  # elements after which factors repeat, times a power of `_FACTOR`; also the size of one computation
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By bytes of an element. 8 bytes count as two elements, or flips of two sign bits would cancel."""


@torch.no_grad()
def fingerprint(tensor: torch.Tensor, offset: int = 0) -> int:
    """Return the fingerprint, less than 2^64, of a tensor or of a part that begins at element `offset`.

    The sum of the fingerprints of all parts, mod 2^64, is that of the whole.
    """
    elements = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    offset *= max(1, tensor.element_size() // 4)
    first_block, begin = divmod(offset, _BLOCK)
    of_block = _factors_of_block(tensor.device)
    sums = [(of_block[begin : begin + elements.numel()] * elements[: _BLOCK - begin]).sum()]
    sums += [(of_block[: part.numel()] * part).sum() for part in elements[_BLOCK - begin :].split(_BLOCK)]
    values = enumerate(torch.stack(sums).tolist(), start=first_block)
    return sum(pow(_FACTOR, block, 2**64) * value for block, value in values) & _MASK


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the fingerprint of each tensor as 16 hexadecimal digits."""
    return {name: f"{fingerprint(tensor):016x}" for name, tensor in tensors.items()}


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Name the tensors whose fingerprints differ, those that only one side has included."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def model_fingerprint(tensors: Mapping[str, int]) -> str:
    """Join the fingerprints of named tensors into one for a whole model."""
    lines = (f"{name} {value & _MASK:016x}\n" for name, value in sorted(tensors.items()))
    return hashlib.blake2b("".join(lines).encode(), digest_size=8).hexdigest()


@functools.cache
def _factors_of_block(device: torch.device) -> torch.Tensor:
    """Return the factors of the first block: splitmix64 of their index, made odd."""
    factors = splitmix64(np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_FACTOR)) | np.uint64(1)
    return torch.from_numpy(factors.view(np.int64)).to(device)

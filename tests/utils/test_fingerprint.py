from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.utils.fingerprint import differing, fingerprint, fingerprints, model_fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGE = 600_000
"""Elements of a tensor of several blocks."""


def random(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flip(tensor: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    """Return a copy with one bit of one element flipped."""
    flipped = tensor.clone()
    flipped.view(torch.uint8)[index * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
    return flipped


@given(st.data())
def test_every_bit_and_every_place_matters(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = random(data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1, 7, 1000, LARGE])), dtype)
    index = data.draw(st.integers(0, len(tensor) - 1))
    other = data.draw(st.integers(0, len(tensor) - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    expected = fingerprint(tensor)
    assert fingerprint(flip(tensor, index, bit)) != expected
    exchanged = tensor.clone()
    exchanged[[index, other]] = tensor[[other, index]]
    assert (fingerprint(exchanged) == expected) == (tensor[index].item() == tensor[other].item())
    assert index == other or fingerprint(flip(flip(tensor, index, bit), other, bit)) != expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_wholesale_changes(dtype: torch.dtype) -> None:
    tensor = random(0, LARGE, dtype)
    changed = [-tensor, tensor.flip(0), tensor.roll(1), tensor.roll(2**18), torch.zeros_like(tensor), tensor * 2]
    assert len({fingerprint(one) for one in (tensor, *changed)}) == 7
    assert fingerprint(tensor.view(600, 1000).t()) == fingerprint(tensor.view(600, 1000).t().contiguous())
    assert fingerprint(torch.tensor([0.0], dtype=dtype)) != fingerprint(torch.tensor([-0.0], dtype=dtype))


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, LARGE), max_size=4))
def test_parts_add_up(dtype: torch.dtype, cuts: list[int]) -> None:
    tensor = random(1, LARGE, dtype)
    bounds = [0, *sorted(cuts), LARGE]
    parts = [fingerprint(tensor[start:end], start) for start, end in itertools.pairwise(bounds)]
    assert sum(parts) % 2**64 == fingerprint(tensor)


def test_the_definition_by_a_loop_in_python() -> None:
    tensor = torch.tensor([1.5, -2.0, 3.25])
    mask, total = 2**64 - 1, 0
    for index, bits in enumerate(tensor.view(torch.int32).tolist()):
        state = (index + 1) * 0x9E3779B97F4A7C15 & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        total += ((state ^ state >> 31) | 1) * bits
    assert fingerprint(tensor) == total & mask


def test_names_of_what_differs() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.zeros(2)}
    told = fingerprints(tensors)
    assert told["a"] == told["b"] and all(len(value) == 16 for value in told.values())
    assert differing(fingerprints(tensors), told) == []
    assert differing(fingerprints(tensors | {"b": -torch.ones(3)}), told) == ["b"]
    assert differing(fingerprints({"a": tensors["a"], "d": tensors["c"]}), told) == ["b", "c", "d"]
    whole = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    assert model_fingerprint(whole) == model_fingerprint(dict(reversed(whole.items())))
    assert model_fingerprint(whole) != model_fingerprint(whole | {"c": 1})

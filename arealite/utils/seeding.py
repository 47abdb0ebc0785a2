"""The random generators of a process: one seed, states as plain data; and a hash for order-independent numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def rng_state() -> dict[str, Any]:
    """Return the states of all generators (CUDA: the current device) as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numpy_words = numpy_state["state"] | {"key": numpy_state["state"]["key"].tolist()}
    return {
        "python": [version, list(words), gauss],
        "numpy": numpy_state | {"state": numpy_words},
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": _to_hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore all generators from an `rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

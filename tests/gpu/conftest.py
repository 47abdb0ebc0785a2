"""Skips what this machine can not run, and lends the cases of `tests/engine`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

NEEDED = {"gpu": 1, "multi_gpu": 2}
"""CUDA devices by mark."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = torch.cuda.device_count()
    for mark, needed in NEEDED.items():
        if item.get_closest_marker(mark) is not None and found < needed:
            pytest.skip(f"needs {needed} CUDA devices: got {found}")

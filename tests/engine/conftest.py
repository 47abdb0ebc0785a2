"""Engines that end with their test, and the model that most of them have."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from training_cases import SPEC, write_model

from arealite.engine.fsdp_engine import FSDPEngine

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lm_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("lm"))


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Initializes engines, and ends them."""
    started: list[FSDPEngine] = []

    def start_engine(engine: FSDPEngine, **options: Any) -> FSDPEngine:
        engine.initialize(None, SPEC, **options)
        started.append(engine)
        return engine

    yield start_engine
    for engine in reversed(started):
        engine.destroy()

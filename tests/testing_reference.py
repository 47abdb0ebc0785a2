"""Fixtures for the embedded engine and its server: a random model, and Hugging Face as the reference."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_qwen3
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), seed=0)


@pytest.fixture(scope="session")
def reference(model_path: str) -> PreTrainedModel:
    """The model as Hugging Face runs it."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

"""A tiny model with a chat template, and its tokenizer, for all tests of data sets."""

from pathlib import Path
from typing import Any

import pytest
from testing_quickstart import make_tiny_model

from arealite.utils.hf import load_hf_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), ["What is 1+1? #### 2"], layers=1)


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Any:
    return load_hf_tokenizer(tiny)

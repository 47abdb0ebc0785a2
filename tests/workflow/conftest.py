"""A tokenizer with tools in its chat template, for all tests of workflows that talk."""

from typing import Any

import pytest
from testing_chat_templates import real_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return real_tokenizer("Qwen2.5")

"""A tokenizer of single bytes for all tests of the proxy."""

from typing import Any

import pytest
from testing_proxy import chatml_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chatml_tokenizer(tmp_path_factory.mktemp("chatml"))

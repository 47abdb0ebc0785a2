from pathlib import Path

import pytest
from testing_quickstart import make_tiny_model

from arealite.utils.hf import load_hf_tokenizer, require_same_vocabulary


def test_models_with_other_tokens_are_refused(tmp_path: Path) -> None:
    ours, same, other = (
        make_tiny_model(tmp_path / name, [text] * 20, layers=1, seed=seed)
        for name, text, seed in (("a", "one two", 1), ("b", "one two", 2), ("c", "six ten", 1))
    )
    tokenizer = load_hf_tokenizer(ours)
    require_same_vocabulary(tokenizer, same)
    with pytest.raises(ValueError, match=r"must have the vocabulary of the policy: got \d+ tokens .* such as '"):
        require_same_vocabulary(tokenizer, other)

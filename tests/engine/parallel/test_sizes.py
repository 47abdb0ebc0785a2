"""Which sizes of ranks can divide a model, and the table of families in docs/models.md."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models import WORKS, config_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.errors import ConfigError
from arealite.engine.parallel.layers import check_sizes

PAGE = Path(__file__).parents[3] / "docs/models.md"


def model_of(family: str, kind: Any = AutoModelForCausalLM, **changes: object) -> PreTrainedModel:
    """Four attention heads, two key heads, and four experts in families that have some."""
    with torch.device("meta"):
        return kind.from_config(config_of(family, **WORKS[family] | changes))


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("Qwen3", "d2t2", None),
        ("Qwen3", "c4", None),
        ("Qwen3Moe", "d2t2e4", None),
        ("Qwen3", "t4", "must divide the key heads of the model: got t4 and 2 in Qwen3ForCausalLM. Write t2."),
        ("Qwen3", "t3", "Write t2."),
        ("Qwen3", "c3", "must divide the attention heads of a rank: got c3 and 4 heads of qwen3 with t1. Write c2."),
        ("Qwen3", "c4t2", "got c4 and 2 heads of qwen3 with t2. Write c2."),
        ("GPT2", "t2", "must have a plan of tensor parallelism in transformers: got GPT2LMHeadModel, which has none."),
        ("Qwen3", "d2e2", "must have a plan of expert parallelism in transformers: got Qwen3ForCausalLM"),
        ("Qwen3Moe", "d8e8", "must divide the experts of a layer: got e8 and 4 in Qwen3MoeForCausalLM. Write e4."),
        ("Mixtral", "d3t2e6", "got e6 and 4 in MixtralForCausalLM. Write e2."),
    ],
)
def test_a_refusal_says_what_would_fit(family: str, sizes: str, words: str | None) -> None:
    if words is None:
        return check_sizes(model_of(family), ParallelSizes.from_str(sizes))
    with pytest.raises(ConfigError) as error:
        check_sizes(model_of(family), ParallelSizes.from_str(sizes))
    assert words in str(error.value)


def test_the_page_says_by_what_a_family_is_divided() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| works \| ([tcep ]+) \|$", PAGE.read_text(), re.MULTILINE)
    found = {}
    for family in WORKS:  # as their larger checkpoints are
        changes = {"embedding_multiplier": 12.0} if family == "Granite" else {}
        model, letters = model_of(family, **changes, tie_word_embeddings=False), []
        for letter in "tcep":
            with contextlib.suppress(ConfigError):
                check_sizes(model, ParallelSizes.from_str(f"d2{letter}2"))
                letters.append(letter)
        found[family] = " ".join(letters)
    assert dict(rows) == found


@pytest.mark.parametrize(
    ("family", "kind", "changes", "words"),
    [
        ("Qwen3", AutoModelForCausalLM, {}, "be 1 for a model whose embeddings are its output layer"),
        ("Llama", AutoModelForCausalLM, {"num_hidden_layers": 1}, "be at most the number of layers, 1"),
        (
            "Granite",
            AutoModelForCausalLM,
            {"embedding_multiplier": 12.0},
            "whose decoder does more than run its layers",
        ),
    ],
)
def test_a_model_that_has_no_stages_is_refused(family: str, kind: Any, changes: dict[str, Any], words: str) -> None:
    untied = {} if "embeddings are" in words else {"tie_word_embeddings": False}
    with pytest.raises(ConfigError, match="p of allocation_mode must ") as error:
        check_sizes(model_of(family, kind, **changes, **untied), ParallelSizes(pipeline=2))
    assert words in str(error.value)

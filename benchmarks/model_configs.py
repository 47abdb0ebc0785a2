"""Sizes of models with random weights, for benchmarks that need no network: Qwen3's, and smaller ones for a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

VOCABULARY = 151_936
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
SIZES: dict[str, dict[str, Any]] = {
    size: dict(zip((*NAMES, *HEADS), numbers, strict=True))
    for size, numbers in {
        "tiny": (512, 64, 192, 2, 4, 2, 16, True),
        "small": (VOCABULARY, 256, 768, 4, 8, 4, 32, False),
        "0.6b": (VOCABULARY, 1024, 3072, 28, 16, 8, 128, True),
        "8b": (VOCABULARY, 4096, 12_288, 36, 32, 8, 128, False),
    }.items()
}
"""What the config of each size says."""


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


def write_config(folder: Path, size: str, *, has_experts: bool = False, **changes: Any) -> None:
    """Write the config of a model, for `init_from_scratch`; experts share the width of the MLP."""
    numbers = SIZES[size] | changes | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0}
    config = Qwen3Config(**numbers)
    if has_experts:
        config = Qwen3MoeConfig(**numbers, **EXPERTS, moe_intermediate_size=numbers["intermediate_size"] // 2)
    config.architectures = [f"Qwen3{'Moe' * has_experts}ForCausalLM"]
    config.save_pretrained(folder)


def write_tiny(folder: str) -> None:
    """Write the model of the quickstart, as `arealite tiny-model` does, which prints its folder."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))
    from tiny_model import write_tiny_model

    write_tiny_model(out=folder, corpus=None, seed=1)

"""Sizes of models with random weights, for benchmarks that need no network: Qwen3's, and smaller ones for a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

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


def write_config(folder: Path, size: str, **changes: Any) -> None:
    """Write the config of a model, for `init_from_scratch`."""
    config = Qwen3Config(**SIZES[size] | changes, max_position_embeddings=40_960, rope_theta=1_000_000.0)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


def write_tiny(folder: str) -> None:
    """Write the model of the quickstart, as `arealite tiny-model` does, which prints its folder."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))
    from tiny_model import write_tiny_model

    write_tiny_model(out=folder, corpus=None, seed=1)

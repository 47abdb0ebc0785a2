"""Shapes of published models."""

from dataclasses import replace
from pathlib import Path

from transformers import Qwen3Config

from arealite.planner.memory import ModelShape


def qwen3(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, *, is_tied: bool = False) -> ModelShape:
    vocab, width = 151_936, 128
    layer = 2 * hidden * (heads + kv_heads) * width + 3 * hidden * mlp + 2 * hidden + 2 * width
    outer = vocab * hidden * (1 if is_tied else 2) + hidden
    return ModelShape(
        num_parameters=layers * layer + outer,
        layer_parameters=layer,
        outer_parameters=outer,
        num_layers=layers,
        hidden=hidden,
        mlp=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab=vocab,
        has_qk_norm=True,
        is_tied=is_tied,
    )


QWEN3_1_7B = qwen3(28, 2048, 6144, 16, 8, is_tied=True)
QWEN3_8B = qwen3(36, 4096, 12288, 32, 8)
QWEN_1_5B = replace(qwen3(28, 1536, 8960, 12, 2), has_qk_norm=False)


def write_qwen3(folder: Path) -> str:
    """Write the config of the one with 8 billion parameters, which is all that a plan reads, and return the folder."""
    shape = QWEN3_8B
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131_072,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)

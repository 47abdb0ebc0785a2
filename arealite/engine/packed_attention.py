"""Exact causal attention over packed sequences with torch's SDPA, as an attention implementation of transformers.

Each sequence of a packed row (`segment_lengths`, an argument of the model's forward) attends only to itself. Models
whose layers mix tokens in another way (chunked or linear attention, sinks, soft-capped scores) are refused.
"""

# H heads, K key/value heads, N packed tokens, L tokens of one sequence, D head size

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from arealite.utils.hf import require_fixed_rope
from arealite.utils.images import sees_images

PACKED_SDPA = "packed_sdpa"
LAYER_TYPES = {"full_attention", "sliding_attention"}
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence; takes `[1, H, N, D]` and `[1, K, N, D]`, returns `[1, N, H, D]`."""
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    if unsupported:
        raise ValueError(
            f"attention of {type(module).__name__} must not need {unsupported[0]}: packed SDPA has no such term. "
            "Set attn_impl: flash_attention_2 on a GPU."
        )
    lengths = list(segment_lengths)
    outputs = [
        F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if sliding_window is None else _window_mask(q.shape[2], sliding_window, q.device),
            dropout_p=dropout,
            is_causal=sliding_window is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2))
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Let a token see itself and the `window - 1` before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def check_packable(model: PreTrainedModel) -> None:
    """Refuse models in which the rows packed with it change a row, or later tokens an earlier one."""
    config = model.config.get_text_config()
    require_fixed_rope(config)
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    layers = model.get_decoder() if sees_images(model.config) else model  # images attend within themselves
    if getattr(config, "is_decoder", None) is False and any(
        getattr(module, "is_causal", None) is False for module in layers.modules()
    ):
        others.add("attention to later tokens")  # an encoder; decoders such as GPT-NeoX also have is_decoder false
    if others or not model._supports_attention_backend or getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"the layers of a trained model must be full or sliding-window attention: got {type(model).__name__} "
            f"with {', '.join(sorted(others)) or 'its own token mixing'}. "
            "Use a model of the Qwen2, Qwen3, Llama or Mistral type."
        )


AttentionInterface.register(PACKED_SDPA, packed_sdpa)

"""The forward pass over packed sequences: exact causal attention for transformers, its selection, inputs with images.

Each sequence of a packed row attends only to itself. Models that mix tokens differently (chunked or linear attention,
sinks, soft-capped scores) are refused. A compiled layer gets the sequence bounds as a tensor, or in an object: a list
would recompile for every number of sequences.

Invariant: every micro-batch of every rank of a vision model runs the vision tower, because its layers are collectives
over all ranks. A micro-batch without images gets an extra sequence with an empty image, which is dropped.
"""

# H heads, K key/value heads, N packed tokens, L tokens of one sequence, S sequences, D head size, I images

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from arealite.api.errors import ConfigError
from arealite.utils.hf import require_fixed_rope
from arealite.utils.images import placeholder_mask, rope_positions, sees_images
from arealite.utils.tensors import on_device

PACKED_SDPA, PACKED_VARLEN = "packed_sdpa", "packed_varlen"
PACKED = (PACKED_SDPA, PACKED_VARLEN)
LAYER_TYPES = {"full_attention", "sliding_attention"}
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
_HALF = (torch.bfloat16, torch.float16)
_SHARES_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""The option for grouped keys since torch 2.12; older kernels group keys without it."""


def pick_attention(attn_impl: str | None, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return the configured attention, else the fastest that runs on the device, and the reason."""
    if attn_impl == PACKED_VARLEN and not _has_varlen(device, dtype):
        raise ConfigError(
            f"attn_impl {PACKED_VARLEN} must have a GPU of compute capability 8.0 and dtype bfloat16: got "
            f"{device.type} and {str(dtype).removeprefix('torch.')}. Remove attn_impl."
        )
    if attn_impl is not None:
        return attn_impl, "as attn_impl says"
    if device.type != "cuda":
        return PACKED_SDPA, f"always on a {device.type}"
    if dtype not in _HALF:
        return PACKED_SDPA, "FlashAttention has no kernel for float32"
    if is_flash_attn_2_available():
        return "flash_attention_2", "flash-attn is installed"
    if _has_varlen(device, dtype):
        return PACKED_VARLEN, "flash-attn is not installed, and torch has its kernel"
    return PACKED_SDPA, "this GPU or this torch has no FlashAttention"


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in _HALF or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


class OnCPU:
    """A tensor among a layer's arguments that stays on the CPU: FSDP copies others, which all layers would wait for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def sequence_bounds(attention: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward that describe sequences of these `lengths` to an attention.

    Other attention implementations of transformers infer sequences from `position_ids`.
    """
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if attention == PACKED_SDPA:
        return {"cu_seqlens": OnCPU(bounds)}  # where it splits tensors
    bounds, longest = on_device(bounds, device), max(lengths)
    if attention == PACKED_VARLEN:
        return {"cu_seqlens": bounds, "max_length": longest}
    if attention.startswith("flash_attention"):
        return {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return {}


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seqlens: OnCPU,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence by SDPA; takes `[1, H, N, D]` and `[1, K, N, D]`, returns `[1, N, H, D]`.

    `cu_seqlens` is `[S + 1]`.
    """
    _require_plain(module, kwargs)
    lengths = cu_seqlens.tensor.diff().tolist()
    sequences = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2))
    outputs = [_sdpa(q, k, v, sliding_window, dropout_p=dropout, scale=scaling) for q, k, v in sequences]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, **options: Any) -> torch.Tensor:
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    mask = None if window is None or window >= length else _window_mask(length, window, q.device)
    if groups > 1 and q.is_cuda and (mask is not None or q.dtype not in _HALF):
        # No fused CUDA kernel groups keys in this case: torch would materialise the scores [H, L, L].
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1, **options
    )


def packed_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence by torch's FlashAttention; shapes are those of `packed_sdpa`.

    `cu_seqlens [S + 1]` is int32 on the GPU, `max_length` the longest sequence.
    """
    _require_plain(module, kwargs)
    if dropout:
        raise ValueError(
            f"attention dropout must be 0 with attn_impl {PACKED_VARLEN}: got {dropout}. Set disable_dropout: true, or "
            f"attn_impl: {PACKED_SDPA}."
        )
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    before = -1 if sliding_window is None else sliding_window - 1  # tokens before the current one
    output: Any = varlen_attn(
        *(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length),
        scale=scaling,
        window_size=(before, 0),
        **_SHARES_KEYS,
    )
    return output[None], None


def _require_plain(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse attention with terms that these kernels do not support."""
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if unsupported:
        raise ValueError(
            f"attention of {type(module).__name__} must not need {unsupported[0]}: packed attention has no such term. "
            "Set attn_impl: flash_attention_2 on a GPU."
        )


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of tokens that attend to themselves and the `window - 1` tokens before."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def check_packable(model: PreTrainedModel) -> None:
    """Refuse models in which a row depends on rows packed with it, or a token on later tokens."""
    config = model.config.get_text_config()
    require_fixed_rope(config)
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    layers = model.get_decoder() if sees_images(model.config) else model  # vision towers are not causal
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


def attention_of_parts(attention: str) -> str | dict[str, str]:
    """Return the attention of each part: images attend within their windows, not within packed sequences."""
    return {"": attention, "text_config": attention, "vision_config": "sdpa"} if attention in PACKED else attention


def vision_inputs(packed: TensorDict, lengths: list[int], config: PretrainedConfig) -> tuple[dict[str, Any], list[int]]:
    """Return the inputs of `decoder_states`, `[N]` or `[3, N]`, of a micro-batch and the lengths of its sequences."""
    ids_N, merge = packed["input_ids"], config.vision_config.spatial_merge_size
    pixel_values, grids_BI3 = (packed.get(key, None) for key in ("pixel_values", "image_grid_thw"))
    if grids_BI3 is not None and grids_BI3.any():
        grids = grids_BI3[packed["cu_seqlens"].diff() > 0].cpu()
    else:
        _require_no_images(ids_N, config)
        lengths, grids = [*lengths, 1], torch.tensor([*[[[0, 0, 0]]] * len(lengths), [[1, merge, merge]]])
        ids_N = torch.cat([ids_N, ids_N.new_full((1,), config.image_token_id)])
        pixel_values = torch.zeros(merge**2, _patch_size(config), device=ids_N.device)
    is_image, positions = [], []
    for ids_L, grid_I3 in zip(ids_N.cpu().split(lengths), grids, strict=True):
        of_row = grid_I3[grid_I3.prod(-1) > 0]
        is_image.append(placeholder_mask(ids_L, int(of_row.prod(-1).sum()) // merge**2, config.image_token_id))
        positions.append(rope_positions(is_image[-1], of_row, merge))
    inputs = {
        "input_ids": ids_N,
        "position_ids": torch.cat(positions, 1),
        "is_image": torch.cat(is_image),
        "image_grid_thw": grids[grids.prod(-1) > 0],
    }
    return {key: value.to(ids_N.device) for key, value in inputs.items()} | {"pixel_values": pixel_values}, lengths


def decoder_states(
    model: PreTrainedModel,
    *,
    input_ids: torch.Tensor,
    is_image: torch.Tensor,
    pixel_values: torch.Tensor,
    image_grid_thw: torch.Tensor,
    **inputs: Any,
) -> torch.Tensor:
    """Return the hidden states `[1, N, H]`: what images become takes the place of their placeholders."""
    embeddings = model.get_input_embeddings()(input_ids)
    images = torch.cat(list(model.get_image_features(pixel_values, image_grid_thw).pooler_output))
    embeddings = embeddings.masked_scatter(is_image[None, :, None], images.to(embeddings.dtype))
    states: torch.Tensor = model.get_decoder()(inputs_embeds=embeddings, **inputs).last_hidden_state
    return states


def _patch_size(config: PretrainedConfig) -> int:
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)


def _require_no_images(ids_N: torch.Tensor, config: PretrainedConfig) -> None:
    """Refuse prompts whose images got lost; a placeholder alone is a token that the model has sampled."""
    follows_N = ids_N[:-1] == config.vision_start_token_id
    if (follows_N & (ids_N[1:] == config.image_token_id)).any():
        raise ValueError(
            "a batch of prompts with images must have pixel_values and image_grid_thw: got none. Use "
            "VisionRLVRWorkflow, or pass sft_batches a processor."
        )


AttentionInterface.register(PACKED_SDPA, torch.compiler.disable(packed_sdpa))  # it reads the bounds
AttentionInterface.register(PACKED_VARLEN, packed_varlen)

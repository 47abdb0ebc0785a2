"""Context parallelism (Ulysses, arXiv:2309.14509): a rank has a slice of the tokens, and some heads in attention.

The attention function exchanges both, so that each head sees all tokens and any implementation of attention serves.
"""

# H query heads, K key heads, n tokens of a rank, D head size

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PretrainedConfig

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.errors import ConfigError
from arealite.utils.images import sees_images


def check_heads(config: PretrainedConfig, sizes: ParallelSizes) -> None:
    """Refuse a model whose tokens can't be split over c ranks."""
    if sizes.context == 1:
        return
    if sees_images(config):
        raise ConfigError(
            f"c of allocation_mode must be 1 for a model that sees images: got {sizes} and {config.model_type}. "
            "Write t or more d instead."
        )
    heads = config.get_text_config().num_attention_heads // sizes.tensor
    if heads % sizes.context:
        fits = max(size for size in range(1, sizes.context) if heads % size == 0)
        raise ConfigError(
            f"c of allocation_mode must divide the attention heads of a rank: got c{sizes.context} and {heads} heads "
            f"of {config.model_type} with t{sizes.tensor}. Write c{fits}."
        )


def over_context(attention: str) -> str:
    """Register an attention implementation for tokens that are split over ranks, and return its name."""
    name = f"context_{attention}"
    AttentionInterface.register(name, torch.compiler.disable(functools.partial(_exchanged, attention)))
    return name


def own_slice(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of `[..., N]`; c divides N."""
    return tokens.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


def _exchanged(
    attention: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context_group: dist.ProcessGroup,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with `[1, H, n, D]` and `[1, K, n, D]`; return `[1, n, H, D]`."""
    num, (heads, key_heads) = dist.get_world_size(context_group), (query.shape[1], key.shape[1])
    repeats = num // math.gcd(key_heads, num)
    if heads % (key_heads * repeats):
        repeats = heads // key_heads
    if repeats > 1:
        key, value = (states.repeat_interleave(repeats, 1) for states in (key, value))
    query, key, value = (_all_tokens(states, context_group) for states in (query, key, value))
    inner: Any = AttentionInterface()[attention]
    output, _ = inner(module, query, key, value, attention_mask, **kwargs)
    return _all_heads(output, context_group), None


def _all_tokens(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all tokens of some heads, `[1, H / c, N, D]`, for some tokens of all heads, `[1, H, n, D]`."""
    parts = states[0].unflatten(0, (dist.get_world_size(group), -1))
    exchanged: torch.Tensor = _Exchange.apply(parts, group)
    return exchanged.transpose(0, 1).flatten(1, 2)[None]


def _all_heads(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return some tokens of all heads, `[1, n, H, D]`, for all tokens of some heads, `[1, N, H / c, D]`."""
    parts = states[0].unflatten(0, (dist.get_world_size(group), -1))
    exchanged: torch.Tensor = _Exchange.apply(parts, group)
    return exchanged.transpose(0, 1).flatten(1, 2)[None]


class _Exchange(torch.autograd.Function):
    """Send part i `[c, ...]` to rank i of a group; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = parts.contiguous()  # `empty_like` keeps the strides of a transposed tensor
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received

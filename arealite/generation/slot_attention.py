"""The KV cache, and the attention over it that Hugging Face models call through their attention interface. A slot holds
the keys and values of one sequence. Running sequences occupy slots 0..n-1, so decoding reads views of the cache, not
copies. A forward pass takes its `SlotStep` as a keyword, which reaches every attention layer."""

# n sequences, N packed tokens, H key-value heads, G query heads per key-value head, D head size, L cached tokens

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "arealite_slots"


class SlotCache:
    """Keys and values of `slots` sequences of at most `context` tokens, and a spare slot for a prompt in chunks."""

    def __init__(self, model: PreTrainedModel, *, slots: int, context: int) -> None:
        """Allocate it with the dtype and on the device of the model."""
        self.slots = slots
        self.context = context
        config, dtype = model.config.get_text_config(), model.dtype
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots + 1, heads, context, head_dim)
        # Attention multiplies masked values by 0, so they must be finite.
        if model.device.type == "cpu":  # numpy maps zeros when they are first touched, so unused slots cost nothing
            try:
                raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            except MemoryError as error:
                raise ValueError(
                    f"the keys and values of {slots} slots of {context} tokens must fit into memory: got {error}. "
                    "Lower slots or context."
                ) from error
            self.kv = torch.from_numpy(raw).view(dtype).view(shape)
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=model.device)

    def copy(self, source: int, destinations: Iterable[int], length: int) -> None:
        """Copy the first `length` tokens of a slot into other slots."""
        for slot in destinations:
            self.kv[:, :, slot, :, :length] = self.kv[:, :, source, :, :length]

    def swap(self, slot_a: int, slot_b: int, length: int) -> None:
        """Exchange the first `length` tokens of two slots."""
        kept = self.kv[:, :, slot_a, :, :length].clone()
        self.copy(slot_b, [slot_a], length)
        self.kv[:, :, slot_b, :, :length] = kept

    def erase(self, slot: int, length: int) -> None:
        """Zero the first `length` tokens of a slot, which may be NaN."""
        self.kv[:, :, slot, :, :length] = 0


class PackedPrefill:
    """Prefill of sequences packed into one row: each attends to its slot's tokens and its own, which are added."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], lengths: Sequence[int], starts: Sequence[int]) -> None:
        """Add `lengths` tokens to slots that hold the first `starts`."""
        device = cache.kv.device
        self.cache = cache
        self.ends = np.cumsum(lengths).tolist()
        self.lengths = list(lengths)
        spans = list(zip(starts, lengths, strict=True))
        self.positions_N = torch.cat([torch.arange(start, start + length) for start, length in spans]).to(device)
        self.slots_N = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(device)
        self._segments = list(zip(slots, starts, self.ends, lengths, strict=True))
        self._masks = [_causal_mask(start, length, device) if start else None for start, length in spans]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Take query `[1, H * G, N, D]`, key and value `[1, H, N, D]`; return `[1, N, H * G, D]`."""
        keys, values = self.cache.kv[layer]
        keys[self.slots_N, :, self.positions_N] = key[0].transpose(0, 1)
        values[self.slots_N, :, self.positions_N] = value[0].transpose(0, 1)
        group, segments = query.shape[1] // key.shape[1], []
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        for (slot, start, end, length), mask in zip(self._segments, self._masks, strict=True):
            own = key[:, :, end - length : end], value[:, :, end - length : end]
            if mask is not None:
                cached = self.cache.kv[layer, :, slot : slot + 1, :, : start + length]
                own = cached[0].repeat_interleave(group, 1), cached[1].repeat_interleave(group, 1)
            rows = query[:, :, end - length : end]
            segments.append(
                F.scaled_dot_product_attention(rows, *own, attn_mask=mask, is_causal=mask is None, scale=scale)
            )
        return torch.cat(segments, 2).transpose(1, 2)


def _causal_mask(start: int, length: int, device: torch.device) -> torch.Tensor:
    """Return which of `start + length` tokens each of the last `length` attends to."""
    positions = torch.arange(start + length, device=device)
    return positions <= positions[start:, None]


class SlotDecode:
    """Decoding of one token for each sequence in slots first..first+n-1."""

    def __init__(self, cache: SlotCache, first: int, positions_n: torch.Tensor, length: int) -> None:
        """`length` is the largest position + 1."""
        self.cache = cache
        self.positions_n = positions_n
        self.first = first
        self.length = length
        device = positions_n.device
        self.rows_n = torch.arange(first, first + len(positions_n), device=device)
        self.bias_nL = torch.zeros(len(positions_n), length, dtype=cache.kv.dtype, device=device)
        self.bias_nL.masked_fill_(torch.arange(length, device=device) > positions_n[:, None], -torch.inf)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Take query `[n, H * G, 1, D]`, key and value `[n, H, 1, D]`; return `[n, 1, H * G, D]`."""
        keys, values = self.cache.kv[layer]
        keys[self.rows_n, :, self.positions_n] = key[:, :, 0]
        values[self.rows_n, :, self.positions_n] = value[:, :, 0]
        n, H, D = len(query), key.shape[1], key.shape[3]
        rows = slice(self.first, self.first + n)
        output_nHGD = F.scaled_dot_product_attention(
            query.reshape(n, H, -1, D),  # query heads of one key-value head become rows of one product
            keys[rows, :, : self.length],
            values[rows, :, : self.length],
            attn_mask=self.bias_nL[:, None, None, :],
            scale=scale,
        )
        return output_nHGD.reshape(n, 1, -1, D)


SlotStep = PackedPrefill | SlotDecode  # one forward pass over the cache


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_step: SlotStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the step's cache, with the signature of Hugging Face's attention interface."""
    if softcap is not None:
        raise ValueError(
            f"attention must not cap its scores: got softcap {softcap}. Serve this model with SGLang or vLLM."
        )
    if sliding_window is not None and sliding_window < slot_step.cache.context:
        raise ValueError(
            f"sliding_window must be at least the context: got {sliding_window} and {slot_step.cache.context}. "
            f"Set the context to {sliding_window}."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return slot_step.attend(layer, query, key, value, scale), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)

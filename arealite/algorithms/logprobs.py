"""Logprobs of packed tokens without materialising the logits.

Results are aligned as in a trajectory: `logprobs[n]` is the logprob of token n given the tokens before it in its
sequence, and 0 for the first token of a sequence. Logits are computed in blocks of the vocabulary, in the forward pass
and again in the backward pass; only the normalizers are kept in between.
"""

# B sequences, T padded tokens, N packed tokens, H hidden size, V vocabulary, K columns of a block, M ids of kept sets

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch.autograd.function import once_differentiable

BLOCK_VALUES = 2**25  # logits in memory at once
MIN_COLUMNS = 1024  # of a block: narrower matrix products are slow
_EXCLUDED = -1e20  # the logit of a token outside of a kept set; finite because 0 * -inf is not a number


class Split(NamedTuple):
    """How ranks with the same N tokens share their logits: in groups over tokens and over the vocabulary."""

    num_tokens: int
    tokens: dist.ProcessGroup | None = None
    vocabulary: dist.ProcessGroup | None = None
    first_id: int = 0
    num_ids: int = 0


@dataclass(frozen=True)
class LazyLogits:
    """Logits `[N, V]` that are computed on demand: `scale * (hidden @ weight.T + bias)`, then the soft cap.

    With a `split`, hidden states are those of this rank's tokens and the weight has its part of the vocabulary, but
    results are of all tokens and of the whole vocabulary, with equal gradients on all ranks.

    A soft cap is `softcap * tanh(logits / softcap)`. Valid only while a loss function runs: the trainer then frees the
    gathered weight.
    """

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    split: Split | None = None

    def dense(self) -> torch.Tensor:
        """Return the logits `[N, V]` with gradient: float32, float64 if the model computes in it."""
        hidden_NH, split = self.hidden_NH, self.split
        if split is None or not split.num_tokens:
            return self.block(0, self.weight_VH.shape[0])
        if split.vocabulary is not None:
            hidden_NH = _SummedGradient.apply(hidden_NH, split.vocabulary)
        logits_NV = replace(self, hidden_NH=hidden_NH).block(0, self.weight_VH.shape[0])
        if split.vocabulary is not None:
            each = -(-split.num_ids // dist.get_world_size(split.vocabulary))
            logits_NV = rows_of_all(logits_NV.T, split.vocabulary, each, split.num_ids).T
        if split.tokens is not None:
            logits_NV = rows_of_all(logits_NV, split.tokens, len(self.hidden_NH), split.num_tokens)
        return logits_NV

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Return the logits `[N, K]` of the tokens from `start` to `stop`."""
        bias_K = None if self.bias_V is None else self.bias_V[start:stop]
        raw_NK = F.linear(self.hidden_NH, self.weight_VH[start:stop], bias_K)
        logits_NK = raw_NK.to(torch.promote_types(raw_NK.dtype, torch.float32))
        if self.scale != 1.0:
            logits_NK = logits_NK * self.scale
        return logits_NK if self.softcap is None else (logits_NK / self.softcap).tanh() * self.softcap


class KeptSets(NamedTuple):
    """Ragged sets of ids that each label was sampled from (top-p, top-k, min-p); a count of 0 is the whole softmax."""

    ids_M: torch.Tensor
    counts_N: torch.Tensor


def kept_sets(micro_batch: Mapping[str, torch.Tensor]) -> KeptSets | None:
    """Return the kept sets of a packed micro-batch; None if it has none."""
    return KeptSets(micro_batch["kept_ids"], micro_batch["kept_counts"]) if "kept_ids" in micro_batch else None


class _Block(NamedTuple):
    """A block of columns of the logits, divided by the temperature."""

    start: int
    stop: int
    scaled_NK: torch.Tensor
    columns_N1: torch.Tensor  # columns of the labels in this block, 0 for other labels
    has_label_N1: torch.Tensor
    excluded_NK: torch.Tensor | None

    def kept(self) -> torch.Tensor:
        """Return the logits without those of excluded tokens."""
        if self.excluded_NK is None:
            return self.scaled_NK
        return self.scaled_NK.masked_fill(self.excluded_NK, _EXCLUDED)


def _blocks(logits: LazyLogits, labels_N: torch.Tensor, temperature: float, kept: KeptSets | None) -> Iterator[_Block]:
    num_tokens, vocabulary = labels_N.shape[0], logits.weight_VH.shape[0]
    num_columns = max(MIN_COLUMNS, BLOCK_VALUES // max(num_tokens, 1))
    if kept is not None:
        rows_N = torch.arange(num_tokens, device=labels_N.device)
        rows_M = rows_N.repeat_interleave(kept.counts_N, output_size=kept.ids_M.shape[0])
    for start in range(0, vocabulary, num_columns):
        stop = min(start + num_columns, vocabulary)
        has_label_N1 = ((labels_N >= start) & (labels_N < stop))[:, None]
        columns_N1 = torch.where(has_label_N1, labels_N[:, None] - start, 0)
        excluded_NK = None
        if kept is not None:
            inside_M = (kept.ids_M >= start) & (kept.ids_M < stop)
            excluded_NK = (kept.counts_N > 0)[:, None].repeat(1, stop - start + 1)
            excluded_NK[rows_M, torch.where(inside_M, kept.ids_M - start, stop - start)] = False
            excluded_NK = excluded_NK[:, :-1]  # without the column for ids of other blocks
        scaled_NK = logits.block(start, stop).div_(temperature)
        yield _Block(start, stop, scaled_NK, columns_N1, has_label_N1, excluded_NK)
        del scaled_NK, excluded_NK  # free them before the next block is computed


@dataclass(frozen=True)
class _Settings:
    """Plain arguments of `_LogprobsAndEntropy`."""

    temperature: float
    scale: float
    softcap: float | None
    with_entropy: bool
    entropy_grad: bool
    vocabulary: dist.ProcessGroup | None  # of ranks with parts of it


class _LogprobsAndEntropy(torch.autograd.Function):
    """Logprobs of labels and entropies of the whole softmax, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        kept: KeptSets | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = LazyLogits(hidden_NH, weight_VH, bias_V, settings.scale, settings.softcap)
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        picked_N, entropy_N = hidden_NH.new_zeros((2, *labels_N.shape), dtype=dtype)
        kept_normalizer_N, normalizer_N = hidden_NH.new_full((2, *labels_N.shape), -torch.inf, dtype=dtype)
        for block in _blocks(logits, labels_N, settings.temperature, kept):
            label_N = block.scaled_NK.gather(1, block.columns_N1).squeeze(1)
            picked_N = torch.where(block.has_label_N1.squeeze(1), label_N, picked_N)
            if kept is not None or not settings.with_entropy:
                kept_normalizer_N = torch.logaddexp(kept_normalizer_N, block.kept().logsumexp(1))
            if settings.with_entropy:
                normalizer_N, entropy_N = _add_entropy(normalizer_N, entropy_N, block.scaled_NK)
            del block  # free it before the next block is computed
        if settings.vocabulary is not None:
            parts = picked_N, kept_normalizer_N, normalizer_N, entropy_N
            picked_N, kept_normalizer_N, normalizer_N, entropy_N = _of_vocabulary(*parts, settings.vocabulary)
        if kept is None and settings.with_entropy:
            kept_normalizer_N = normalizer_N
        ctx.settings, ctx.kept = settings, kept
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N, kept_normalizer_N, normalizer_N, entropy_N)
        if not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return picked_N - kept_normalizer_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, grad_entropy_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N, kept_normalizer_N, normalizer_N, entropy_N = ctx.saved_tensors
        settings: _Settings = ctx.settings
        logits = LazyLogits(hidden_NH, weight_VH, bias_V, settings.scale, settings.softcap)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=grad_N.dtype) if needs_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if bias_V is not None and needs_bias else None
        for block in _blocks(logits, labels_N, settings.temperature, ctx.kept):
            slope_NK, by_entropy_NK = None, None
            if settings.softcap is not None:
                slope_NK = 1.0 - (block.scaled_NK * (settings.temperature / settings.softcap)).square_()
            if settings.entropy_grad:  # the gradient of -entropy is p (log p + entropy)
                by_entropy_NK = block.scaled_NK - normalizer_N[:, None]
                by_entropy_NK = by_entropy_NK.exp().mul_(by_entropy_NK.add_(entropy_N[:, None]))
                by_entropy_NK.mul_(grad_entropy_N[:, None])
            d_NK = block.kept().sub_(kept_normalizer_N[:, None]).exp_().mul_(-grad_N[:, None])
            d_NK.scatter_add_(1, block.columns_N1, torch.where(block.has_label_N1, grad_N[:, None], 0.0))
            if by_entropy_NK is not None:
                d_NK.sub_(by_entropy_NK)
            if slope_NK is not None:
                d_NK.mul_(slope_NK)
            d_NK.mul_(settings.scale / settings.temperature)
            columns = slice(block.start, block.stop)
            if grad_bias_V is not None:
                grad_bias_V[columns] = d_NK.sum(0)
            rounded_NK = d_NK.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH += rounded_NK @ weight_VH[columns]
            if grad_weight_VH is not None:
                torch.mm(rounded_NK.t(), hidden_NH, out=grad_weight_VH[columns])
            del block, d_NK, rounded_NK, slope_NK, by_entropy_NK  # free them before the next block
        if grad_hidden_NH is not None:
            if settings.vocabulary is not None:
                dist.all_reduce(grad_hidden_NH, group=settings.vocabulary)
            grad_hidden_NH = grad_hidden_NH.to(hidden_NH.dtype)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None


def _add_entropy(
    normalizer_N: torch.Tensor, entropy_N: torch.Tensor, scaled_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalizers and entropies of the columns so far together with those of a block.

    The entropy of a union is the weighted entropy of both parts plus the entropy of the choice between them.
    """
    of_block_N = scaled_NK.logsumexp(1)
    logprobs_NK = scaled_NK.sub_(of_block_N[:, None])
    entropy_of_block_N = -(logprobs_NK.exp().mul_(logprobs_NK)).sum(1)
    union_N = torch.logaddexp(normalizer_N, of_block_N)
    before_N, block_N = (normalizer_N - union_N).exp(), (of_block_N - union_N).exp()
    choice_N = torch.special.entr(before_N) + torch.special.entr(block_N)
    return union_N, before_N * entropy_N + block_N * entropy_of_block_N + choice_N


def _of_vocabulary(
    picked_N: torch.Tensor,
    kept_normalizer_N: torch.Tensor,
    normalizer_N: torch.Tensor,
    entropy_N: torch.Tensor,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Return the label's logit, both normalizers and the entropy of the whole vocabulary, from those of its parts."""
    largest_2N = torch.stack([kept_normalizer_N, normalizer_N])
    dist.all_reduce(largest_2N, dist.ReduceOp.MAX, group=group)
    largest_2N = largest_2N.clamp(min=torch.finfo(largest_2N.dtype).min)  # -inf where none is computed
    shares_2N = (torch.stack([kept_normalizer_N, normalizer_N]) - largest_2N).exp()
    sums_3N = torch.cat([shares_2N, picked_N[None]])
    dist.all_reduce(sums_3N, group=group)
    whole_2N = largest_2N + sums_3N[:2].log()
    share_N = (normalizer_N - whole_2N[1]).exp().nan_to_num(0.0)
    entropy_N = share_N * entropy_N + torch.special.entr(share_N)  # as in _add_entropy
    dist.all_reduce(entropy_N, group=group)
    return sums_3N[2], whole_2N[0], whole_2N[1], entropy_N


class _SummedGradient(torch.autograd.Function):
    """The identity; its gradient is the sum over a group of ranks that go on with the same tensor."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _RowsOfAll(torch.autograd.Function):
    """Rows of all ranks of a group. Every rank goes on with all of them, so its own have the whole gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup, each: int) -> torch.Tensor:
        ctx.first, ctx.num = dist.get_rank(group) * each, len(own)
        padded = own.new_zeros(each, *own.shape[1:])
        padded[: len(own)] = own
        every = own.new_empty(dist.get_world_size(group), *padded.shape)
        dist.all_gather(list(every), padded, group=group)
        return every.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient[ctx.first : ctx.first + ctx.num], None, None


def rows_of_all(own: torch.Tensor, group: dist.ProcessGroup, each: int, num: int) -> torch.Tensor:
    """Return the `num` rows of the ranks of a group, which have `each` as far as there are so many (collective)."""
    every: torch.Tensor = _RowsOfAll.apply(own, group, each)
    return every[:num]


def _of_tokens(kept: KeptSets | None, tokens: slice | torch.Tensor) -> KeptSets | None:
    """Return the kept sets of some tokens, given by a slice or a mask."""
    if kept is None:
        return None
    is_chosen_N = torch.zeros_like(kept.counts_N, dtype=torch.bool)
    is_chosen_N[tokens] = True
    return KeptSets(kept.ids_M[is_chosen_N.repeat_interleave(kept.counts_N)], kept.counts_N[tokens])


def gather_logprobs_entropy(
    logits: LazyLogits,
    labels: torch.Tensor,
    temperature: float = 1.0,
    *,
    kept: KeptSets | None = None,
    needed: torch.Tensor | None = None,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of `gather_logprobs` and the entropies `[N]` of the whole softmax, 0 without `with_entropy`.

    Entropies carry a gradient only with `entropy_grad`. Both are 0 outside of the bool mask `needed [N]`, and on a CPU
    not computed.
    """
    split, hidden_NH = logits.split or Split(len(labels)), logits.hidden_NH
    each = len(hidden_NH)
    if split.tokens is not None:
        own = slice(dist.get_rank(split.tokens) * each, (dist.get_rank(split.tokens) + 1) * each)
        labels, kept, needed = labels[own], _of_tokens(kept, own), None if needed is None else needed[own]
        hidden_NH = hidden_NH[: len(labels)]  # without the padding that ends the tokens
    num_own, rows_N = len(labels), None
    if needed is not None and needed.device.type == "cpu":  # on a GPU the host would wait for the number of rows
        rows_N = needed.nonzero()[:, 0]
        hidden_NH, labels, kept = hidden_NH.index_select(0, rows_N), labels[rows_N], _of_tokens(kept, needed)
    if split.first_id:  # ids count from the first one of this rank's part
        labels = labels - split.first_id
        kept = None if kept is None else kept._replace(ids_M=kept.ids_M - split.first_id)
    scale, softcap, group = logits.scale, logits.softcap, split.vocabulary
    settings = _Settings(temperature, scale, softcap, with_entropy, entropy_grad, group)
    found = _LogprobsAndEntropy.apply(hidden_NH, logits.weight_VH, logits.bias_V, labels, kept, settings)
    if rows_N is not None:
        found = tuple(one.new_zeros(num_own).index_copy(0, rows_N, one) for one in found)
    elif needed is not None:
        found = tuple(one.masked_fill(~needed, 0.0) for one in found)
    if split.tokens is None:
        return found
    logprobs_N, entropy_N = (rows_of_all(one, split.tokens, each, split.num_tokens) for one in found)
    return logprobs_N, entropy_N


def gather_logprobs(
    logits: LazyLogits, labels: torch.Tensor, temperature: float = 1.0, *, kept: KeptSets | None = None
) -> torch.Tensor:
    """Return the float32 logprobs `[N]` of `labels [N]` under softmax(`logits [N, V]` / temperature).

    With `kept`, the softmax of a token is over its kept set (the ids that a server with top-p, top-k or min-p sampled
    from), which contains its label. Otherwise it is over the whole vocabulary.
    """
    return gather_logprobs_entropy(logits, labels, temperature, kept=kept, with_entropy=False)[0]


def packed_logprobs(
    logits: LazyLogits,
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    temperature: float = 1.0,
    *,
    kept: KeptSets | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logprob `[N]` of each of `input_ids [N]`, from logits and `cu_seqlens [B + 1]`.

    `kept` has the set that each of `input_ids` was sampled from. Tokens outside of the bool `mask [N]` are 0.
    """
    return packed_logprobs_entropy(
        logits, input_ids, cu_seqlens, temperature, kept=kept, mask=mask, with_entropy=False
    )[0]


def packed_logprobs_entropy(
    logits: LazyLogits,
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    temperature: float = 1.0,
    *,
    kept: KeptSets | None = None,
    mask: torch.Tensor | None = None,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `packed_logprobs` and the entropy `[N]` of the whole softmax at the step that sampled each token."""
    labels, needed = input_ids.roll(-1), None if mask is None else mask.roll(-1)
    choices: Any = {"with_entropy": with_entropy, "entropy_grad": entropy_grad}
    logprobs_N, entropy_N = gather_logprobs_entropy(
        logits, labels, temperature, kept=_of_labels(kept), needed=needed, **choices
    )
    return align_with_tokens(logprobs_N, cu_seqlens), align_with_tokens(entropy_N, cu_seqlens)


def _of_labels(kept: KeptSets | None) -> KeptSets | None:
    """Move each token's set to the position before it. The first token of a sequence must have no set."""
    return None if kept is None else KeptSets(kept.ids_M, kept.counts_N.roll(-1))


def align_with_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Shift `values [N]` of the next token to that token; the first of a sequence (`cu_seqlens [B + 1]`) gets 0."""
    is_first_N = torch.zeros(values.shape[0] + 1, dtype=torch.bool, device=values.device)
    is_first_N[cu_seqlens.long()] = True
    return values.roll(1).masked_fill(is_first_N[:-1], 0.0)


def trained_tokens(attention_mask: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the bool mask `[B, T]` of tokens to train on, without padding and the first token of each sequence."""
    real_BT = attention_mask.bool()
    return loss_mask.bool() & real_BT & (real_BT.cumsum(dim=1) > 1)


def count_loss_tokens(micro_batch: TensorDict) -> float:
    """Return the number of tokens under the `loss_mask` of a packed micro-batch."""
    return float(micro_batch["loss_mask"].sum())

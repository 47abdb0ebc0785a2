"""Logprobs of packed tokens from logits.

Results are aligned with the token they are about, as in a trajectory: `logprobs[n]` is the logprob of token n given the
tokens before it in its sequence, and 0 for the first token of a sequence, which nothing predicts.
"""

# B sequences, T padded tokens, N packed tokens, V vocabulary

from typing import Any

import torch
from tensordict import TensorDict

CHUNK_TOKENS = 1024  # whose float32 probabilities are in memory at once


class _LogprobsAndEntropy(torch.autograd.Function):
    """Logprobs of labels and entropies, chunk by chunk; only the logits are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, normalizers = [], [], []
        for logits, labels in zip(logits_NV.split(CHUNK_TOKENS), labels_N.split(CHUNK_TOKENS)):
            scaled = logits.float() / temperature
            normalizer = scaled.logsumexp(dim=-1)
            logprobs.append(scaled.gather(-1, labels[:, None]).squeeze(-1) - normalizer)
            normalizers.append(normalizer)
            if with_entropy:
                all_logprobs = scaled.sub_(normalizer[:, None])
                entropies.append(-(all_logprobs.exp() * all_logprobs).sum(dim=-1))
        normalizer_N = torch.cat(normalizers)
        entropy_N = torch.cat(entropies) if with_entropy else torch.zeros_like(normalizer_N)
        ctx.save_for_backward(logits_NV, labels_N, normalizer_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: torch.Tensor, _grad_entropy_N: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_NV, labels_N, normalizer_N = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        chunks = (t.split(CHUNK_TOKENS) for t in (logits_NV, labels_N, normalizer_N, grad_N, grad_logits_NV))
        for logits, labels, normalizer, grad, grad_logits in zip(*chunks):
            scale = (grad / ctx.temperature)[:, None]
            d_logits = (logits.float() / ctx.temperature - normalizer[:, None]).exp_().mul_(-scale)
            d_logits.scatter_add_(-1, labels[:, None], scale)
            grad_logits.copy_(d_logits)
        return grad_logits_NV, None, None, None


def gather_logprobs(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return the float32 logprobs `[N]` of `labels [N]` under softmax(`logits [N, V]` / temperature).

    The softmax is over the whole vocabulary; a server that samples with top-p or top-k reports larger logprobs.
    """
    return _LogprobsAndEntropy.apply(logits, labels, temperature, False)[0]


def gather_logprobs_entropy(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of `gather_logprobs` and the entropies `[N]`, which carry no gradient."""
    return _LogprobsAndEntropy.apply(logits, labels, temperature, True)


def packed_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprob `[N]` of each of `input_ids [N]`, from `logits [N, V]` and `cu_seqlens [B + 1]`."""
    return align_with_tokens(gather_logprobs(logits, input_ids.roll(-1), temperature), cu_seqlens)


def packed_logprobs_entropy(
    logits: torch.Tensor, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `packed_logprobs` and the entropy `[N]` of the distribution that each token was sampled from."""
    logprobs_N, entropy_N = gather_logprobs_entropy(logits, input_ids.roll(-1), temperature)
    return align_with_tokens(logprobs_N, cu_seqlens), align_with_tokens(entropy_N, cu_seqlens)


def align_with_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Move `values [N]` about the next token to that token; the first of a sequence (`cu_seqlens [B + 1]`) gets 0."""
    is_first_N = torch.zeros(values.shape[0] + 1, dtype=torch.bool, device=values.device)
    is_first_N[cu_seqlens.long()] = True
    return values.roll(1).masked_fill(is_first_N[:-1], 0.0)


def trained_tokens(attention_mask: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the bool mask `[B, T]` of tokens to train on, without padding and the first token of each sequence."""
    real_BT = attention_mask.bool()
    return loss_mask.bool() & real_BT & (real_BT.cumsum(dim=1) > 1)


def count_loss_tokens(micro_batch: TensorDict) -> float:
    """Return how many tokens the loss of a packed micro-batch is a mean over."""
    return float(micro_batch["loss_mask"].sum())

"""Logarithms of probability ratios, their means over completions, and KL estimates and penalties built on them.

Invariant: ratios are finite, for any values at masked positions and any distance between two policies.

Names of estimators of KL(p || q) from single tokens sampled from p are J. Schulman's,
http://joschu.net/blog/kl-approx.html. An estimator of the divergence is not an estimator of its gradient: as a loss,
k1 has the expected gradient 0, and k3 that of KL(q || p).
"""

# N packed tokens, C completions of a micro-batch

from collections.abc import Collection, Mapping

import torch

MAX_LOG_RATIO = 20.0
"""Bound of log ratios in both directions: beyond 88 the exponential is infinite in float32, and one such token would
make the whole gradient NaN."""


def masked_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the difference of two logprobs `[any shape]`, within +-MAX_LOG_RATIO, and 0 outside of the bool `mask`."""
    return torch.where(mask, numerator - denominator, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def completion_sums(
    values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_completions: int
) -> torch.Tensor:
    """Return `[C]`: the sum of `values [N]` under the bool `mask [N]` over the tokens of each completion."""
    return values.new_zeros(num_completions).index_add(0, segment_ids.long(), torch.where(mask, values, 0.0))


def completion_means(
    values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_completions: int
) -> torch.Tensor:
    """Return `[C]`: the mean of `values [N]` under the bool `mask [N]`, 0 for a completion without such tokens."""
    counts_S = completion_sums(torch.ones_like(values), mask, segment_ids, num_completions)
    return completion_sums(values, mask, segment_ids, num_completions) / counts_S.clamp(min=1)


def completion_means_of_tokens(values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return `[N]`: the mean of each token's completion; every completion of the micro-batch must have a token."""
    ids_N = segment_ids.long()
    means_N = completion_means(values, mask, ids_N, num_completions=len(ids_N))  # at most N: no sync for their number
    return means_N[ids_N]


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}. Choose one of these.")


def kl_estimates(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return the estimator k1, k2 or k3 per token, for x = log p - log q `[any shape]`: x, x^2 / 2, exp(-x) - 1 + x."""
    check_choice("estimator", estimator, ("k1", "k2", "k3"))
    if estimator == "k3":
        return k3(log_ratio)
    return log_ratio if estimator == "k1" else 0.5 * log_ratio.square()


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(-x) - 1 + x per token, for x = log p - log q `[any shape]`: unbiased and never negative."""
    return torch.expm1(-log_ratio) + log_ratio


def kl_losses(
    logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, estimator: str, whole: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a penalty `[N]` whose expected gradient is that of KL(pi || pi_ref), for `logprobs [N]`; 0 where masked.

    `batch` has `ref_logprobs`, `proximal_logprobs` and `loss_mask`, `[N]`. k2 is used as it is, k3 times
    r = pi / pi_prox with its gradient, which weights tokens as pi would sample them. k1 is refused: its expected
    gradient is 0. If `logprobs` are over kept sets, `whole [N]` are over the whole vocabulary, like the reference's.
    """
    check_choice("the estimator of a KL loss", estimator, ("k2", "k3"))
    mask_N = batch["loss_mask"].bool()
    estimates_N = kl_estimates(
        masked_log_ratio(logprobs if whole is None else whole, batch["ref_logprobs"], mask_N), estimator
    )
    if estimator == "k2":
        return estimates_N
    return masked_log_ratio(logprobs, batch["proximal_logprobs"], mask_N).exp() * estimates_N

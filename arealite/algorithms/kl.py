"""Estimators of KL(p || q) from single tokens sampled from p, and the penalties built on them.

Names are J. Schulman's, http://joschu.net/blog/kl-approx.html. An estimator of the divergence is not an estimator of
its gradient: as a loss, k1 has the expected gradient 0, and k3 that of KL(q || p).
"""

# N packed tokens

from collections.abc import Mapping

import torch

from arealite.algorithms.ratios import check_choice, masked_log_ratio


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

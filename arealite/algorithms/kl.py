"""Estimators of KL(p || q) from single tokens sampled from p."""

import torch


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(-x) - 1 + x per token, for x = log p - log q `[any shape]`: unbiased and never negative.

    Estimator k3 of J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    return torch.expm1(-log_ratio) + log_ratio

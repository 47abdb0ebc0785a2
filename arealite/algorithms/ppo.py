"""The PPO objective, decoupled or not. Pure functions of tensors.

Tensors may have any one shape; each element belongs to one token, and only those under `loss_mask` count.
"""

from __future__ import annotations

import torch


def ppo_actor_loss_fn(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    loss_mask: torch.Tensor,
    c_clip: float | None = None,
    behav_imp_weight_cap: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the decoupled PPO loss, a mean over `loss_mask`, and per-token statistics without gradient.

    The ratio to the proximal policy is clipped to 1 +- eps_clip; the result is weighed by the ratio of the proximal
    to the sampling policy. Tokens whose weight is above the cap are left out of the sum but not of the count. With
    proximal = rollout this is PPO. `c_clip` bounds the loss of negative advantages at c_clip * |advantage| (dual clip).
    """
    loss_mask = loss_mask.bool()
    log_ratio = torch.where(loss_mask, logprobs - proximal_logprobs, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = loss_mask & (unclipped < clipped)
    is_dual_clipped = torch.zeros_like(loss_mask)
    if c_clip is not None:
        bound = c_clip * advantages.abs()
        is_dual_clipped = loss_mask & (loss > bound)
        loss = torch.minimum(loss, bound)
    log_weight = torch.where(loss_mask, proximal_logprobs - rollout_logprobs, 0.0)
    behave_weight = log_weight.exp()
    is_kept = loss_mask
    if behav_imp_weight_cap is not None:
        is_kept = loss_mask & (behave_weight <= behav_imp_weight_cap)
    total = torch.where(is_kept, loss * behave_weight, 0.0).sum() / loss_mask.sum().clamp(min=1)
    statistics = {
        "importance_weight": ratio.detach(),
        "approx_kl": k3_divergence(-log_ratio.detach()),
        "clip_ratio": is_clipped,
        "dual_clip_ratio": is_dual_clipped,
        "behave_weight": behave_weight,
        "behave_dropped_ratio": loss_mask & ~is_kept,
    }
    return total, statistics


def k3_divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(p || q) at tokens sampled from p, given log p - log q: exp(-x) - 1 + x, never negative."""
    return torch.expm1(-log_ratio) + log_ratio

"""The PPO objective, decoupled or not."""

# N packed tokens

import torch

from arealite.algorithms.kl import k3

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios count as at most this, either way: beyond 88 their exponential is infinite in float32, and one
such token would make the whole gradient NaN."""


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
    """Return the decoupled PPO loss, a mean over `loss_mask`, and statistics `[N]` without gradient. Arguments: `[N]`.

    loss = -mean(w * min(r A, clip(r, 1 - eps, 1 + eps) A)) with r = pi / pi_prox and w = pi_prox / pi_rollout. With
    pi_prox = pi_rollout this is PPO, arXiv:1707.06347; decoupled: arXiv:2505.24298. Tokens with w above
    `behav_imp_weight_cap`, or at e^MAX_LOG_RATIO, leave the sum but not the count. `c_clip` (dual clip,
    arXiv:1912.09729) bounds the loss of a token with a negative advantage at c_clip * |A|.
    """
    loss_mask = loss_mask.bool()
    log_ratio_N = torch.where(loss_mask, logprobs - proximal_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    unclipped_N = -advantages * ratio_N
    clipped_N = -advantages * ratio_N.clamp(1.0 - eps_clip, 1.0 + eps_clip)
    loss_N = torch.maximum(unclipped_N, clipped_N)
    is_clipped_N = loss_mask & (unclipped_N < clipped_N)
    is_dual_clipped_N = torch.zeros_like(loss_mask)
    if c_clip is not None:
        bound_N = c_clip * advantages.abs()
        is_dual_clipped_N = loss_mask & (loss_N > bound_N)
        loss_N = torch.minimum(loss_N, bound_N)
    log_weight_N = torch.where(loss_mask, proximal_logprobs - rollout_logprobs, 0.0)
    rollout_weight_N = log_weight_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_kept_N = loss_mask & (log_weight_N < MAX_LOG_RATIO)  # else one such token would own the step
    if behav_imp_weight_cap is not None:
        is_kept_N &= rollout_weight_N <= behav_imp_weight_cap
    loss = (torch.where(is_kept_N, loss_N, 0.0) * rollout_weight_N).sum() / loss_mask.sum().clamp(min=1)
    statistics = {
        "ratio": ratio_N.detach(),
        "approx_kl": k3(-log_ratio_N.detach()),
        "clip_ratio": is_clipped_N,
        "clip_ratio_high": is_clipped_N & (advantages > 0),
        "clip_ratio_low": is_clipped_N & (advantages < 0),
        "dual_clip_ratio": is_dual_clipped_N,
        "rollout_importance_weight": rollout_weight_N,
        "rollout_importance_dropped_ratio": loss_mask & ~is_kept_N,
    }
    return loss, statistics

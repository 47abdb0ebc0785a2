"""Rewards and values per token: GAE, and the loss of a critic."""

# B sequences, T padded tokens, N packed tokens

from collections.abc import Mapping

import torch
import torch.nn.functional as F


def token_rewards(
    scores: torch.Tensor,
    loss_mask: torch.Tensor,
    kl: torch.Tensor | None = None,
    *,
    kl_ctl: float = 0.0,
    turn_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[B, T]`: `scores [B]` on the last trained token of each row, minus `kl_ctl * kl [B, T]` on every one.

    `turn_rewards [B, T]` are added to the last trained token at or before the position that earned them. Rewards
    earned in the context, before any trained token, are dropped.
    """
    mask_BT = loss_mask.bool()
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(dim=1).flip(1) == 1)
    rewards_BT = torch.zeros_like(mask_BT, dtype=scores.dtype)
    if turn_rewards is not None:
        places_BT = torch.where(mask_BT, torch.arange(mask_BT.shape[1], device=mask_BT.device), -1).cummax(dim=1).values
        earned_BT = torch.where(places_BT >= 0, turn_rewards, 0.0).to(rewards_BT)
        rewards_BT = rewards_BT.scatter_add(1, places_BT.clamp(min=0), earned_BT)
    rewards_BT = rewards_BT + torch.where(is_last_BT, scores[:, None], 0.0)
    if kl is not None:
        rewards_BT = rewards_BT - torch.where(mask_BT, kl_ctl * kl, 0.0)
    return rewards_BT


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float | torch.Tensor,
) -> torch.Tensor:
    """Return generalised advantage estimates `[B, T]` from `[B, T]` tensors, arXiv:1506.02438.

    A_t = sum_k (discount * lambda)^k delta_(t+k) with delta_t = r_t + discount * V_(t+1) - V_t. Only sampled tokens
    are time steps: tokens of prompts and environment replies neither discount nor get an advantage. The value after
    the last sampled token is 0, even for a truncated completion. `gae_lambda` may be `[B]`, one value per row.
    """
    mask_BT = loss_mask.bool()
    length = mask_BT.shape[1]
    places_BT = torch.where(mask_BT, torch.arange(length, device=mask_BT.device), length)
    of_next_BT = F.pad(places_BT, (0, 1), value=length).flip(1).cummin(dim=1).values.flip(1)[:, 1:]
    next_values_BT = F.pad(values, (0, 1)).gather(1, of_next_BT)
    deltas_BT = torch.where(mask_BT, rewards + discount * next_values_BT - values, 0.0)
    if not isinstance(gae_lambda, torch.Tensor) and discount * gae_lambda == 1:
        sums_BT = deltas_BT.flip(1).cumsum(dim=1).flip(1)
    else:
        factor_B1 = torch.as_tensor(discount * gae_lambda, dtype=rewards.dtype, device=rewards.device).view(-1, 1)
        sums_BT = _discounted_sums(deltas_BT, torch.where(mask_BT, factor_B1, 1.0))
    return torch.where(mask_BT, sums_BT, 0.0)


def _discounted_sums(terms_BT: torch.Tensor, factors_BT: torch.Tensor) -> torch.Tensor:
    """Return s `[B, T]` with s_t = term_t + factor_t * s_(t+1), in log2(T) rounds that double the reach of the sums."""
    sums_BT, reach, length = terms_BT.clone(), 1, terms_BT.shape[1]
    while reach < length:  # factors are now products over `reach` tokens
        sums_BT[:, :-reach] += factors_BT[:, : length - reach] * sums_BT[:, reach:]
        factors_BT = factors_BT[:, :-reach] * factors_BT[:, reach:]
        reach *= 2
    return sums_BT


def adaptive_lambda(lengths: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """Return 1 - 1 / (alpha * length) `[B]`, at least 0, for `lengths [B]` in trained tokens: VAPO, arXiv:2504.05118.

    The weights lambda^k of GAE then sum to about alpha * length, for short and for long completions.
    """
    return (1.0 - 1.0 / (alpha * lengths.clamp(min=1))).clamp(min=0.0)


def critic_loss(
    values: torch.Tensor, batch: Mapping[str, torch.Tensor], *, eps_clip: float | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return max((v - R)^2, (clip(v, old +- eps_clip) - R)^2) / 2 per token, for `values [N]`, and statistics.

    `batch` has `values` (the old ones), `returns` and `loss_mask`, `[N]`. Without `eps_clip`: (v - R)^2 / 2.
    """
    mask_N = batch["loss_mask"].bool()
    values_N = torch.where(mask_N, values, 0.0)
    returns_N = torch.where(mask_N, batch["returns"], 0.0)
    errors_N = (values_N - returns_N).square()
    is_clipped_N = torch.zeros_like(mask_N)
    if eps_clip is not None:
        old_N = torch.where(mask_N, batch["values"], 0.0)
        clipped_errors_N = (values_N.clamp(old_N - eps_clip, old_N + eps_clip) - returns_N).square()
        is_clipped_N = clipped_errors_N > errors_N
        errors_N = torch.maximum(errors_N, clipped_errors_N)
    return 0.5 * errors_N, {"value": values_N.detach(), "clip_ratio": is_clipped_N}

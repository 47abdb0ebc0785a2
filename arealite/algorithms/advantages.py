"""From rewards to advantages.

Rows may lie on several ranks: statistics take a `reduce` that sums a tensor over ranks (default: one rank).
"""

# B sequences, T padded tokens, N values, G groups

from collections.abc import Callable

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def whiten(
    values: torch.Tensor, groups: torch.Tensor, num_groups: int, *, eps: float = 1e-6, reduce: Reduce = torch.clone
) -> torch.Tensor:
    """Return `(value - mean) / (deviation + eps)` `[N]` within each group, for `values [N]` of `groups [N]`.

    Of rewards, with the samples of a prompt as a group, this is the advantage of GRPO, arXiv:2402.03300.
    """
    mean_G, deviation_G = spread(values, groups, num_groups, reduce=reduce)
    return ((values.double() - mean_G[groups]) / (deviation_G[groups] + eps)).to(values.dtype)


def spread(
    values: torch.Tensor, groups: torch.Tensor, num_groups: int, *, reduce: Reduce = torch.clone
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation `[G]` of the `values [N]` of each group; a group without values gets NaN."""
    values_N = values.double()  # so that a group of one, or of equal values, deviates by exactly 0
    mean_G = _group_mean(values_N, groups, num_groups, reduce)
    return mean_G, _group_mean((values_N - mean_G[groups]).square(), groups, num_groups, reduce).sqrt()


def _group_mean(values_N: torch.Tensor, groups_N: torch.Tensor, num_groups: int, reduce: Reduce) -> torch.Tensor:
    sums_2G = torch.zeros(2, num_groups, dtype=torch.float64, device=values_N.device)
    sums_2G[0].index_add_(0, groups_N, values_N)
    sums_2G[1].index_add_(0, groups_N, torch.ones_like(values_N))
    sums_2G = reduce(sums_2G)
    return sums_2G[0] / sums_2G[1]


def scale_rewards(rewards: torch.Tensor, *, scaling: float, bias: float, clip: float | None = None) -> torch.Tensor:
    """Return `(reward + bias) * scaling` of `rewards [B]`, clipped to +- clip."""
    scaled_B = (rewards.float() + bias) * scaling
    return scaled_B if clip is None else scaled_B.clamp(-clip, clip)


def token_rewards(
    scores: torch.Tensor, loss_mask: torch.Tensor, kl: torch.Tensor | None = None, *, kl_ctl: float = 0.0
) -> torch.Tensor:
    """Return `[B, T]`: `scores [B]` on the last trained token of each row, minus `kl_ctl * kl [B, T]` on every one."""
    mask_BT = loss_mask.bool()
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(dim=1).flip(1) == 1)
    rewards_BT = torch.where(is_last_BT, scores[:, None], 0.0)
    if kl is not None:
        rewards_BT = rewards_BT - torch.where(mask_BT, kl_ctl * kl, 0.0)
    return rewards_BT


def gae(
    rewards: torch.Tensor, values: torch.Tensor, loss_mask: torch.Tensor, *, discount: float, gae_lambda: float
) -> torch.Tensor:
    """Return generalised advantage estimates `[B, T]` from `[B, T]` tensors, arXiv:1506.02438.

    A_t = sum_k (discount * lambda)^k delta_(t+k) with delta_t = r_t + discount * V_(t+1) - V_t. Time counts sampled
    tokens only: those of prompts and of an environment's replies neither discount nor get an advantage.
    """
    mask_BT = loss_mask.bool()
    advantages_BT = torch.zeros_like(rewards)
    next_value_B = carried_B = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        is_action_B = mask_BT[:, t]
        delta_B = rewards[:, t] + discount * next_value_B - values[:, t]
        carried_B = torch.where(is_action_B, delta_B + discount * gae_lambda * carried_B, carried_B)
        next_value_B = torch.where(is_action_B, values[:, t], next_value_B)
        advantages_BT[:, t] = torch.where(is_action_B, carried_B, 0.0)
    return advantages_BT

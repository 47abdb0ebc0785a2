"""Advantages: one number per trained token, from the rewards of samples, by group or by values per token (GAE).

`advantages_of` is the entry point. A *sample* is one member of a prompt's group: a row of the batch, or several rows
(turns of an agent) that share its advantage. Rows may be spread over ranks: statistics take a `reduce` that sums a
tensor over ranks (default: one rank).
"""

# B sequences, T padded tokens, R samples, N values, G groups

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from arealite.algorithms.ratios import check_choice

Batch = Mapping[str, torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]
AdvantageFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rewards [R], group_index [R], num_tokens [R]) -> advantages [R]` over all samples of the global batch."""


@dataclass(frozen=True)
class Samples:
    """The samples of this rank; statistics compare them within groups over all ranks. `[R]`, except `of_rows [B]`."""

    rewards: torch.Tensor
    groups: torch.Tensor
    """Group of each sample, numbered from 0 to `num_groups` over all ranks."""
    num_groups: int
    num_tokens: torch.Tensor
    """Trained tokens."""
    num_sampled: torch.Tensor
    """Sampled tokens, trained or not."""
    is_truncated: torch.Tensor
    of_rows: torch.Tensor
    """Index of the sample that each row belongs to."""


def advantages_of(
    batch: Batch,
    samples: Samples,
    choices: Any,
    reduce: Reduce = torch.clone,
    *,
    advantage_fn: AdvantageFn | None = None,
) -> dict[str, torch.Tensor]:
    """Return `advantages [B, T]`, 0 outside of `loss_mask`; for a critic also `returns` and `returns_mask`.

    GRPO: the reward of a sample minus the mean of its group, divided by their deviation, for each trained token.
    `choices` is the resolved config of the actor. `batch` has `loss_mask` and, if tokens have their own rewards,
    `values`, `turn_rewards` or `kl` (estimates of the divergence from the reference, for a penalty in the reward).
    """
    mask_BT = batch["loss_mask"]
    scores_R = shaped_rewards(batch, samples, choices)
    if advantage_fn is not None:
        scores_R = advantage_fn(scores_R, samples.groups, samples.num_tokens)
    else:
        if choices.reward_scale == "group_mean":
            _require_no_negative(scores_R)
        scores_R = reward_advantages(
            scores_R,
            samples.groups,
            samples.num_groups,
            baseline="none" if choices.baseline == "critic" else choices.baseline,  # its values are per token
            scale=choices.reward_scale,
            lengths=samples.num_tokens,
            reduce=reduce,
        )
    columns = {"advantages": torch.where(mask_BT, scores_R[samples.of_rows][:, None], 0.0)}
    if choices.baseline == "critic" or choices.discount != 1 or {"kl", "turn_rewards"} & batch.keys():
        columns = token_advantages(batch, scores_R, samples, choices)
    if choices.adv_norm or choices.group_adv_norm:
        groups_B, num_groups = samples.groups[samples.of_rows], samples.num_groups
        if not choices.group_adv_norm:  # the whole batch is one group
            groups_B, num_groups = torch.zeros_like(groups_B), 1
        groups_N, values_N = groups_B[:, None].expand_as(mask_BT)[mask_BT], columns["advantages"][mask_BT]
        columns["advantages"][mask_BT] = whiten(values_N, groups_N, num_groups, reduce=reduce)
    return columns


def shaped_rewards(batch: Batch, samples: Samples, choices: Any) -> torch.Tensor:
    """Return the rewards `[R]` after the rules for truncated and overlong samples, bias, scale and clip."""
    rewards_R = samples.rewards.float()
    if choices.truncated == "zero":
        rewards_R = rewards_R.masked_fill(samples.is_truncated, 0.0)
    if choices.overlong_buffer is not None:
        bounds = {"longest": choices.max_new_tokens, "buffer": choices.overlong_buffer}
        rewards_R = rewards_R + choices.overlong_penalty * overlong_penalty(samples.num_sampled, **bounds)
    rewards_R = (rewards_R + choices.reward_bias) * choices.reward_scaling
    if choices.reward_clip is not None:
        rewards_R = rewards_R.clamp(-choices.reward_clip, choices.reward_clip)
    if choices.baseline == "leave_one_out" and "kl" in batch:  # the baseline of the others includes it
        kl_R = torch.zeros_like(rewards_R).index_add(0, samples.of_rows, batch["kl"].sum(dim=1))
        rewards_R = rewards_R - choices.kl_ctl * kl_R
    return rewards_R


def _require_no_negative(rewards: torch.Tensor) -> None:
    """Division by a group mean of 0 or below would give no advantages, or reversed ones."""
    if (rewards < 0).any():
        raise ValueError(
            f"rewards must be at least 0 with reward_scale group_mean: got {rewards.min().item():g}. Set "
            "actor.reward_scale=group_std, or a reward function that has none below 0."
        )


def reward_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    num_groups: int,
    *,
    baseline: str = "group_mean",
    scale: str = "group_std",
    lengths: torch.Tensor | None = None,
    reduce: Reduce = torch.clone,
) -> torch.Tensor:
    """Return the advantage `[B]` of each completion: (reward - baseline) / scale, of `rewards [B]` in `groups [B]`.

    Baselines: none, group_mean (GRPO), leave_one_out (mean of the other samples: RLOO, arXiv:2402.14740) and
    length_weighted (mean weighted by trained tokens, `lengths [B]`; least variance, arXiv:2505.23585). Scales: none,
    group_std, batch_std (arXiv:2508.08221) and group_mean (for rewards >= 0: MaxRL, arXiv:2602.02710). Deviations are
    population deviations. A group of size 1 or with equal rewards gets 0 with every baseline except none.
    """
    check_choice("baseline", baseline, ("none", "group_mean", "leave_one_out", "length_weighted"))
    check_choice("scale", scale, ("none", "group_std", "batch_std", "group_mean"))
    rewards_B = centred_B = rewards.double()
    mean_G, deviation_G = spread(rewards_B, groups, num_groups, reduce=reduce)
    if baseline == "length_weighted":
        if lengths is None:
            raise ValueError("lengths must be given with baseline length_weighted: got None. Give the trained tokens.")
        baseline_G = _group_mean(rewards_B, lengths.double(), groups, num_groups, reduce)
        centred_B = rewards_B - baseline_G.nan_to_num()[groups]
    elif baseline != "none":
        centred_B = rewards_B - mean_G[groups]
    if baseline == "leave_one_out":
        sizes_B = reduce(torch.bincount(groups, minlength=num_groups).double())[groups]
        centred_B = centred_B * sizes_B / (sizes_B - 1).clamp(min=1)
    if scale == "group_mean":
        centred_B = torch.where(mean_G[groups] > 0, centred_B / mean_G[groups], 0.0)
    elif scale != "none":
        if scale == "batch_std":
            deviation_G = spread(rewards_B, torch.zeros_like(groups), 1, reduce=reduce)[1].expand(num_groups)
        centred_B = centred_B / (deviation_G[groups] + 1e-6)
    return centred_B.to(rewards.dtype)


def overlong_penalty(lengths: torch.Tensor, *, longest: int, buffer: int) -> torch.Tensor:
    """Return `[B]`: 0 for `lengths [B]` up to longest - buffer, then falling to -1 at `longest`, arXiv:2503.14476.

    Add it to rewards before the baseline is subtracted.
    """
    return ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


# Statistics of groups


def whiten(
    values: torch.Tensor, groups: torch.Tensor, num_groups: int, *, eps: float = 1e-6, reduce: Reduce = torch.clone
) -> torch.Tensor:
    """Return `(value - mean) / (deviation + eps)` `[N]` within each group, for `values [N]` of `groups [N]`.

    Applied to rewards, with the samples of a prompt as a group, this is the advantage of GRPO, arXiv:2402.03300.
    """
    mean_G, deviation_G = spread(values, groups, num_groups, reduce=reduce)
    return ((values.double() - mean_G[groups]) / (deviation_G[groups] + eps)).to(values.dtype)


def spread(
    values: torch.Tensor, groups: torch.Tensor, num_groups: int, *, reduce: Reduce = torch.clone
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation `[G]` of the `values [N]` of each group; a group without values gets NaN."""
    values_N = values.double()  # groups of size 1 or of equal values must have a deviation of exactly 0
    weights_N = torch.ones_like(values_N)
    mean_G = _group_mean(values_N, weights_N, groups, num_groups, reduce)
    return mean_G, _group_mean((values_N - mean_G[groups]).square(), weights_N, groups, num_groups, reduce).sqrt()


def _group_mean(
    values_N: torch.Tensor, weights_N: torch.Tensor, groups_N: torch.Tensor, num_groups: int, reduce: Reduce
) -> torch.Tensor:
    sums_2G = torch.zeros(2, num_groups, dtype=torch.float64, device=values_N.device)
    sums_2G[0].index_add_(0, groups_N, values_N * weights_N)
    sums_2G[1].index_add_(0, groups_N, weights_N)
    sums_2G = reduce(sums_2G)
    return sums_2G[0] / sums_2G[1]


def reward_spread(
    rewards: torch.Tensor, groups: torch.Tensor, num_groups: int, *, reduce: Reduce = torch.clone
) -> dict[str, float]:
    """Return the deviation of `rewards [R]` over all ranks, and the share of dead groups.

    The rewards of a dead group are all equal: with a group baseline it has no gradient.
    """
    (deviation,) = spread(rewards, torch.zeros_like(groups), 1, reduce=reduce)[1].tolist()
    deviations_G = spread(rewards, groups, num_groups, reduce=reduce)[1]
    return {"reward/std": deviation, "reward/dead_group_ratio": (deviations_G == 0).sum().item() / num_groups}


# Rewards per token


def token_advantages(batch: Batch, scores: torch.Tensor, samples: Samples, choices: Any) -> dict[str, torch.Tensor]:
    """Return the columns of `advantages_of` before normalisation, by GAE from `scores [R]` of the samples.

    The reward of a token is the score (last token only) plus its turn reward minus the KL penalty. Without a critic,
    values are 0.
    """
    mask_BT, turn_rewards_BT = batch["loss_mask"], batch.get("turn_rewards")
    if turn_rewards_BT is not None:  # scores keep only the change by bias, penalties and clipping
        turn_rewards_BT = turn_rewards_BT * choices.reward_scaling
        scores = scores - samples.rewards * choices.reward_scaling
    kl_BT = None if choices.baseline == "leave_one_out" else batch.get("kl")
    penalties = {"kl_ctl": choices.kl_ctl, "turn_rewards": turn_rewards_BT}
    rewards_BT = token_rewards(scores[samples.of_rows], mask_BT, kl_BT, **penalties)
    columns, values_BT = {}, torch.zeros_like(rewards_BT)
    if choices.baseline == "critic":
        values_BT = torch.where(mask_BT, batch["values"], 0.0)
        settings = {"discount": choices.discount, "gae_lambda": choices.returns_lambda}
        columns = {"returns": gae(rewards_BT, values_BT, mask_BT, **settings) + values_BT, "returns_mask": mask_BT}
    advantages_BT = gae(rewards_BT, values_BT, mask_BT, discount=choices.discount, gae_lambda=choices.gae_lambda)
    return columns | {"advantages": advantages_BT}


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

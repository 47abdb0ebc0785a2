"""From rewards to advantages.

Rows may lie on several ranks: statistics take a `reduce` that sums a tensor over ranks (default: one rank).
"""

# B sequences, T padded tokens, N values, G groups

from collections.abc import Callable

import torch
import torch.nn.functional as F

from arealite.algorithms.ratios import check_choice, masked_log_ratio

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
    """Return the advantage `[B]` of each answer: (reward - baseline) / scale, of `rewards [B]` in `groups [B]`.

    Baselines: none, group_mean (GRPO), leave_one_out (the mean of the other answers: RLOO, arXiv:2402.14740) and
    length_weighted (by the trained tokens, `lengths [B]`, the baseline of least variance: arXiv:2505.23585). Scales:
    none, group_std, batch_std (arXiv:2508.08221) and group_mean (for rewards >= 0: MaxRL, arXiv:2602.02710). Deviations
    are of the population. A group of one, or whose rewards are all equal, gets 0 with any baseline but none.
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


def distillation_advantages(
    teacher_logprobs: torch.Tensor, student_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Return log pi_teacher - log pi_student per token, `[B, T]` like the arguments, of tokens sampled by the student.

    With it a policy gradient is that of -KL(student || teacher), token by token.
    """
    return masked_log_ratio(teacher_logprobs, student_logprobs, loss_mask.bool()).detach()


def overlong_penalty(lengths: torch.Tensor, *, longest: int, buffer: int) -> torch.Tensor:
    """Return `[B]`: 0 for `lengths [B]` up to longest - buffer, then falling to -1 at `longest`, arXiv:2503.14476.

    To be added to rewards before their baseline is taken.
    """
    return ((longest - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


def scale_rewards(rewards: torch.Tensor, *, scaling: float, bias: float, clip: float | None = None) -> torch.Tensor:
    """Return `(reward + bias) * scaling` of `rewards [B]`, clipped to +- clip."""
    scaled_B = (rewards.float() + bias) * scaling
    return scaled_B if clip is None else scaled_B.clamp(-clip, clip)


def token_rewards(
    scores: torch.Tensor,
    loss_mask: torch.Tensor,
    kl: torch.Tensor | None = None,
    *,
    kl_ctl: float = 0.0,
    turn_rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[B, T]`: `scores [B]` on the last trained token of each row, minus `kl_ctl * kl [B, T]` on every one.

    Beside them `turn_rewards [B, T]` come when they were earned, on the last trained token until then. What a row's
    context earned, before any trained token, is over.
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

    A_t = sum_k (discount * lambda)^k delta_(t+k) with delta_t = r_t + discount * V_(t+1) - V_t. Time counts sampled
    tokens only: those of prompts and of an environment's replies neither discount nor get an advantage. After the last
    one there is no value, also if the answer was truncated. `gae_lambda` may be `[B]`, one for each row.
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
    """Return s with s_t = term_t + factor_t * s_(t+1) `[B, T]`, in log2(T) rounds; each doubles how far sums reach."""
    sums_BT, reach, length = terms_BT.clone(), 1, terms_BT.shape[1]
    while reach < length:  # factors are now products over `reach` tokens
        sums_BT[:, :-reach] += factors_BT[:, : length - reach] * sums_BT[:, reach:]
        factors_BT = factors_BT[:, :-reach] * factors_BT[:, reach:]
        reach *= 2
    return sums_BT


def adaptive_lambda(lengths: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """Return 1 - 1 / (alpha * length) `[B]`, at least 0, for `lengths [B]` in trained tokens: VAPO, arXiv:2504.05118.

    The weights lambda^k of GAE then sum to about alpha * length, for short and for long answers.
    """
    return (1.0 - 1.0 / (alpha * lengths.clamp(min=1))).clamp(min=0.0)


def gae_returns(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float | torch.Tensor,
) -> torch.Tensor:
    """Return the targets `[B, T]` of a critic: advantages of `gae`, not whitened, plus values; 0 where masked."""
    advantages_BT = gae(rewards, values, loss_mask, discount=discount, gae_lambda=gae_lambda)
    return torch.where(loss_mask.bool(), advantages_BT + values, 0.0)

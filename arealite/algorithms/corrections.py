"""Off-policy corrections: factors and masks of token losses.

The rollout policy is the server's, with its numerics and older weights; the proximal policy is the trainer's before the
update. Corrections are computed once per batch, before it is split, and carry no gradient. A masked token leaves the
sum of the losses, but not the count that divides it.
"""

# B completions, T padded tokens

import math
from collections.abc import Mapping
from typing import Any

import torch

from arealite.algorithms.ratios import MAX_LOG_RATIO, check_choice, kl_estimates, masked_log_ratio

MAX_TOKEN_WEIGHT = 2.0
"""Bound of token weights at level geometric, whose configured bounds apply to completions; the bound of TIS."""


def corrections_of(batch: Mapping[str, torch.Tensor], choices: Any) -> torch.Tensor:
    """Return the factor `[B, T]` of each token's objective; `choices` is a resolved actor block.

    `batch` has `proximal_logprobs`, `rollout_logprobs`, `advantages` and `loss_mask`, `[B, T]`.
    """
    mask_BT, logprobs = batch["loss_mask"], (batch["proximal_logprobs"], batch["rollout_logprobs"])
    factors_BT = torch.ones_like(batch["rollout_logprobs"])
    if choices.correction.action != "none":
        settings = {key: value for key, value in vars(choices.correction).items() if value is not None}
        factors_BT = correction_factors(*logprobs, mask_BT, **settings)
    if choices.sequence_mask_delta is not None:
        drifted_B = drifted_completions(*logprobs, batch["advantages"], mask_BT, delta=choices.sequence_mask_delta)
        factors_BT = factors_BT.masked_fill(drifted_B[:, None], 0.0)
    return factors_BT


@torch.no_grad()
def correction_factors(
    proximal_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    level: str = "token",
    action: str = "truncate",
    lower: float | None = None,
    upper: float | None = None,
    metric: str = "ratio",
) -> torch.Tensor:
    """Return the factor `[B, T]` of each token's loss, from `[B, T]` tensors; 0 outside of the mask.

    The weight is w = pi_prox / pi_rollout of the token; at level sequence the product of w over the completion, at
    level geometric the geometric mean. Truncate bounds it (TIS). Mask keeps it where it is within the bounds, and is 0
    elsewhere (IcePop); at level geometric, tokens of a kept completion have their own w as factor, at most
    MAX_TOKEN_WEIGHT. `metric` k1, k2 or k3 bounds estimates of KL(pi_rollout || pi_prox) instead: per token, summed, or
    averaged over the completion. A weight without a bound that reaches e^MAX_LOG_RATIO becomes 0: it would dominate the
    step.
    """
    check_choice("level", level, ("token", "sequence", "geometric"))
    check_choice("action", action, ("truncate", "mask"))
    if action == "truncate":
        check_choice("the metric of action truncate", metric, ("ratio",))
    mask_BT = loss_mask.bool()
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    log_weights_BT = masked_log_ratio(proximal_logprobs, rollout_logprobs, mask_BT)
    pooled_BT = _pool(log_weights_BT, mask_BT, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if action == "truncate":
        is_kept_BT = mask_BT & ((pooled_BT < MAX_LOG_RATIO) | (high < math.inf))
        return torch.where(is_kept_BT, pooled_BT.exp().clamp(low, high), 0.0)
    if metric == "ratio":
        bounded_BT = pooled_BT.exp()
    else:
        bounded_BT = _pool(kl_estimates(-log_weights_BT, metric), mask_BT, level)
    is_kept_BT = mask_BT & (low <= bounded_BT) & (bounded_BT <= high) & (pooled_BT < MAX_LOG_RATIO)
    factors_BT = log_weights_BT.exp().clamp(max=MAX_TOKEN_WEIGHT) if level == "geometric" else pooled_BT.exp()
    return torch.where(is_kept_BT, factors_BT, 0.0)


@torch.no_grad()
def drifted_completions(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    delta: float,
) -> torch.Tensor:
    """Return `[B]`: True for completions with negative advantages and a mean log(pi_rollout / pi) above `delta`.

    Arguments are `[B, T]`. The policy has moved away from these completions already: the sequence mask of
    DeepSeek-V3.2, arXiv:2512.02556.
    """
    mask_BT = loss_mask.bool()
    lengths_B = mask_BT.sum(dim=1).clamp(min=1)
    drift_B = masked_log_ratio(rollout_logprobs, logprobs, mask_BT).sum(dim=1) / lengths_B
    return (drift_B > delta) & (torch.where(mask_BT, advantages, 0.0).sum(dim=1) < 0)


def _pool(values_BT: torch.Tensor, mask_BT: torch.Tensor, level: str) -> torch.Tensor:
    """Return `[B, T]`: the values, their sums per completion (level sequence) or their means (level geometric)."""
    if level == "token":
        return values_BT
    divisor_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1) if level == "geometric" else 1
    return (values_BT.sum(dim=1, keepdim=True) / divisor_B1).expand_as(values_BT)

"""Policy-gradient objectives: one loss per token, and the weight of each token in the loss of an optimizer step.

Each is `f(logprobs [N], batch, settings) -> (token losses [N], statistics)` over `[N]` tensors of a packed micro-batch:
`proximal_logprobs`, `rollout_logprobs`, `advantages`, `loss_mask`, `segment_ids` (row of a token). The actor averages
over tokens and multiplies by the off-policy correction, because both depend on the whole batch. Invariants: the loss of
a token depends only on tokens of its row; masked tokens have loss and gradient 0, whatever their values; where all
ratios are 1, the gradient of a completion is -advantage. Statistics are `[N]` and carry no gradient.

Weights come from counts over the whole batch on all ranks, before it is split into micro-batches. The loss is then a
plain sum of weight times token loss, which no split can change. Completions and groups without trained tokens are not
counted.
"""

# N packed tokens, S completions of the micro-batch, B completions of the batch, T padded tokens, G groups

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from arealite.algorithms.advantages import Reduce
from arealite.algorithms.ratios import check_choice, completion_means_of_tokens, k3, masked_log_ratio

Batch = Mapping[str, torch.Tensor]
TokenLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]
TokenLossFn = Callable[[torch.Tensor, TensorDict], TokenLosses]
"""`(logprobs [N], micro_batch) -> (token losses [N], statistics [N] by name)`; the actor averages."""

MAX_DPPO_RATIO = 20.0


def token_losses(logprobs: torch.Tensor, batch: Batch, choices: Any) -> TokenLosses:
    """Return the losses and statistics of the objective that `choices`, the actor's resolved config, selects.

    A token with advantage 0 has loss and gradient 0 under every objective.
    """
    match choices.objective:
        case "ppo":
            bounds = {"eps_clip": choices.eps_clip, "eps_clip_higher": choices.eps_clip_higher}
            return ppo(logprobs, batch, **bounds, c_clip=choices.c_clip, level=choices.importance_sampling_level)
        case "reinforce":
            return reinforce(logprobs, batch)
        case "cispo":
            return cispo(logprobs, batch, cispo_max=choices.cispo_max)
        case "sapo":
            taus = {"tau_positive": choices.sapo_tau_positive, "tau_negative": choices.sapo_tau_negative}
            return sapo(logprobs, batch, **taus)
        case "gmpo":
            return gmpo(logprobs, batch, eps_log=choices.gmpo_eps_log)
        case "dppo":
            return dppo(logprobs, batch, delta=choices.dppo_delta)
        case unknown:
            raise AssertionError(f"an objective without a loss: {unknown}")


def ppo(
    logprobs: torch.Tensor,
    batch: Batch,
    *,
    eps_clip: float,
    eps_clip_higher: float,
    c_clip: float | None = None,
    level: str = "token",
) -> TokenLosses:
    """Return max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_higher) A) with r = pi / pi_prox, arXiv:1707.06347.

    `c_clip` (dual clip, arXiv:1912.09729) bounds the loss of a token with a negative advantage at c_clip * |A|. With
    `level="sequence"`, r is the geometric mean over the completion for all its tokens (GSPO, arXiv:2507.18071).
    """
    check_choice("level", level, ("token", "sequence"))
    mask_N, advantages_N, log_ratio_N = _inputs(logprobs, batch)
    statistics = _ratio_statistics(log_ratio_N)
    if level == "sequence":
        log_ratio_N = completion_means_of_tokens(log_ratio_N, mask_N, batch["segment_ids"])
        statistics["ratio"] = log_ratio_N.detach().exp()
    ratio_N = log_ratio_N.exp()
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    losses_N = torch.maximum(unclipped_N, clipped_N)
    statistics |= _clip_statistics(unclipped_N < clipped_N, advantages_N)
    if c_clip is not None:
        bound_N = c_clip * advantages_N.abs()
        statistics["dual_clip_ratio"] = losses_N > bound_N
        losses_N = torch.minimum(losses_N, bound_N)
    return losses_N, statistics


def reinforce(logprobs: torch.Tensor, batch: Batch) -> TokenLosses:
    """Return -A log pi: REINFORCE, without a ratio. Statistics are relative to the proximal policy."""
    mask_N, advantages_N, log_ratio_N = _inputs(logprobs, batch)
    return -advantages_N * torch.where(mask_N, logprobs, 0.0), _ratio_statistics(log_ratio_N)


def cispo(logprobs: torch.Tensor, batch: Batch, *, cispo_max: float) -> TokenLosses:
    """Return -min(r, cispo_max) A log pi with r = pi / pi_prox detached, arXiv:2506.13585.

    There is no lower bound. `cispo_max` is a ratio, not a distance from 1.
    """
    mask_N, advantages_N, log_ratio_N = _inputs(logprobs, batch)
    ratio_N = log_ratio_N.detach().exp()
    losses_N = -ratio_N.clamp(max=cispo_max) * advantages_N * torch.where(mask_N, logprobs, 0.0)
    return losses_N, _ratio_statistics(log_ratio_N) | _clip_statistics(ratio_N > cispo_max, advantages_N)


def sapo(logprobs: torch.Tensor, batch: Batch, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """Return -A (4 / tau) sigmoid(tau (r - 1)) with r = pi / pi_prox: a soft clip, arXiv:2511.20347.

    tau is `tau_positive` where A > 0, `tau_negative` elsewhere.
    """
    _, advantages_N, log_ratio_N = _inputs(logprobs, batch)
    tau_N = torch.where(advantages_N > 0, torch.full_like(advantages_N, tau_positive), tau_negative)
    losses_N = -advantages_N * 4.0 / tau_N * torch.sigmoid(tau_N * log_ratio_N.expm1())
    return losses_N, _ratio_statistics(log_ratio_N)


def gmpo(logprobs: torch.Tensor, batch: Batch, *, eps_log: float) -> TokenLosses:
    """Return -A times the geometric mean over the completion of clipped ratios r = pi / pi_prox, arXiv:2507.20673.

    A token's log ratio is clipped to +-`eps_log` where that makes the objective smaller, before the mean. The advantage
    must be the same for all tokens of a completion.
    """
    mask_N, advantages_N, log_ratio_N = _inputs(logprobs, batch)
    sign_N = advantages_N.sign()
    kept_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * log_ratio_N.clamp(-eps_log, eps_log))
    mean_N = completion_means_of_tokens(kept_N, mask_N, batch["segment_ids"])
    is_clipped_N = sign_N * log_ratio_N > eps_log
    return -advantages_N * mean_N.exp(), _ratio_statistics(log_ratio_N) | _clip_statistics(is_clipped_N, advantages_N)


def dppo(logprobs: torch.Tensor, batch: Batch, *, delta: float) -> TokenLosses:
    """Return -min(u, 20) A log pi with u = pi / pi_rollout detached, arXiv:2602.04879.

    Tokens whose probability has already moved by more than `delta` from the rollout policy in the direction of their
    advantage have loss 0 (total variation). The ratio includes the off-policy correction.
    """
    mask_N, advantages_N, log_ratio_N = _inputs(logprobs, batch)
    weight_N = masked_log_ratio(logprobs.detach(), batch["rollout_logprobs"], mask_N).exp().clamp(max=MAX_DPPO_RATIO)
    moved_N = torch.where(mask_N, logprobs.detach().exp() - batch["rollout_logprobs"].exp(), 0.0)
    is_dropped_N = torch.where(advantages_N > 0, moved_N > delta, moved_N < -delta)
    losses_N = -weight_N * advantages_N * torch.where(mask_N & ~is_dropped_N, logprobs, 0.0)
    return losses_N, _ratio_statistics(log_ratio_N) | _clip_statistics(is_dropped_N, advantages_N)


def _inputs(logprobs_N: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mask, advantages and the log ratio to the proximal policy `[N]`, both 0 outside of the mask."""
    mask_N = batch["loss_mask"].bool()
    log_ratio_N = masked_log_ratio(logprobs_N, batch["proximal_logprobs"], mask_N)
    return mask_N, torch.where(mask_N, batch["advantages"], 0.0), log_ratio_N


def _ratio_statistics(log_ratio_N: torch.Tensor) -> dict[str, torch.Tensor]:
    log_ratio_N = log_ratio_N.detach()
    return {"ratio": log_ratio_N.exp(), "approx_kl": k3(-log_ratio_N)}


def _clip_statistics(is_clipped_N: torch.Tensor, advantages_N: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "clip_ratio": is_clipped_N,
        "clip_ratio_high": is_clipped_N & (advantages_N > 0),
        "clip_ratio_low": is_clipped_N & (advantages_N < 0),
    }


def token_weights(
    loss_mask: torch.Tensor,
    groups: torch.Tensor,
    num_groups: int,
    *,
    aggregation: str = "token_mean",
    loss_constant: float | None = None,
    reduce: Reduce = torch.clone,
) -> torch.Tensor:
    """Return the weight `[B, T]` of each token, 0 outside of `loss_mask [B, T]`, for rows of `groups [B]`.

    token_mean: 1 / tokens. sequence_mean: 1 / (completions * tokens of the completion). prompt_mean: 1 / (groups *
    tokens of the group). constant: 1 / (completions * loss_constant), Dr. GRPO, arXiv:2503.20783.
    """
    check_choice("aggregation", aggregation, ("token_mean", "sequence_mean", "prompt_mean", "constant"))
    if aggregation == "constant" and not (loss_constant or 0) > 0:
        raise ValueError(
            f"loss_constant must be positive with aggregation constant: got {loss_constant}. "
            "Set it to max_new_tokens (Dr. GRPO), or to 1 for the sum over a completion."
        )
    mask_BT = loss_mask.bool()
    lengths_B = mask_BT.sum(dim=1).double()
    counts_2G = torch.zeros(2, num_groups, dtype=torch.float64, device=mask_BT.device)
    counts_2G[0].index_add_(0, groups, lengths_B)
    counts_2G[1].index_add_(0, groups, (lengths_B > 0).double())
    tokens_G, completions_G = reduce(counts_2G)
    if aggregation == "token_mean":
        divisor_B = tokens_G.sum().expand_as(lengths_B)
    elif aggregation == "sequence_mean":
        divisor_B = completions_G.sum() * lengths_B
    elif aggregation == "prompt_mean":
        divisor_B = (tokens_G > 0).sum() * tokens_G[groups]
    else:
        divisor_B = (completions_G.sum() * float(loss_constant or 0)).expand_as(lengths_B)
    return torch.where(mask_BT, 1.0 / divisor_B[:, None], 0.0).float()


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

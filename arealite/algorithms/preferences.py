"""Losses of preference pairs: DPO, IPO and the Bradley-Terry loss of reward models.

Row 2p is the chosen completion of pair p, row 2p + 1 the rejected one; both are in the same micro-batch.
"""

# N packed tokens, B rows, P pairs

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from arealite.algorithms.ratios import completion_means, completion_sums, masked_log_ratio

PairLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]


def completion_log_ratios(
    logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, per_token: bool = False
) -> torch.Tensor:
    """Return `[B]`: log(pi / pi_ref) of each completion, for `logprobs [N]`; its mean over tokens with `per_token`.

    `batch` has `ref_logprobs`, `loss_mask` and `segment_ids`, `[N]`, and `cu_seqlens [B + 1]`.
    """
    mask_N = batch["loss_mask"].bool()
    log_ratio_N = masked_log_ratio(logprobs, batch["ref_logprobs"], mask_N)
    return (completion_means if per_token else completion_sums)(
        log_ratio_N, mask_N, batch["segment_ids"], len(batch["cu_seqlens"]) - 1
    )


def last_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return `[B]`: the value of the last token of each row, for `values [N]` and `cu_seqlens [B + 1]`."""
    return values[cu_seqlens[1:].long() - 1]


def dpo(log_ratios: torch.Tensor, *, beta: float) -> PairLosses:
    """Return -log sigmoid(beta d) `[P]`, d = chosen - rejected of `log_ratios [B]`, and statistics `[P]`.

    arXiv:2305.18290.
    """
    chosen_P, rejected_P = _pairs(log_ratios)
    return -logsigmoid(beta * (chosen_P - rejected_P)), _statistics(beta * chosen_P, beta * rejected_P)


def ipo(log_ratios: torch.Tensor, *, tau: float) -> PairLosses:
    """Return (d - 1 / (2 tau))^2 `[P]`, d = chosen - rejected of `log_ratios [B]` per token, arXiv:2310.12036."""
    chosen_P, rejected_P = _pairs(log_ratios)
    return (chosen_P - rejected_P - 0.5 / tau).square(), _statistics(tau * chosen_P, tau * rejected_P)


def bradley_terry(scores: torch.Tensor, *, center: float = 0.0) -> PairLosses:
    """Return -log sigmoid(chosen - rejected) + center (chosen + rejected)^2 `[P]`, of `scores [B]`, and statistics."""
    chosen_P, rejected_P = _pairs(scores)
    losses_P = -logsigmoid(chosen_P - rejected_P) + center * (chosen_P + rejected_P).square()
    return losses_P, _statistics(chosen_P, rejected_P)


def _pairs(values_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if len(values_B) % 2:
        raise ValueError(f"rows must come in pairs: got {len(values_B)} rows. Keep the rows of a pair together.")
    return values_B[0::2], values_B[1::2]


def _statistics(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics `[P]` of the rewards of the policy or the reward model."""
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    margin_P = chosen_P - rejected_P
    rewards = {"chosen_reward": chosen_P, "rejected_reward": rejected_P}
    return rewards | {"margin": margin_P, "accuracy": margin_P > 0}

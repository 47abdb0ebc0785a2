"""Weights of token losses in the loss of an optimizer step.

Weights come from counts over the whole batch on all ranks, before it is split into micro-batches. The loss is then a
plain sum of weight times token loss, which no split can change. Completions and groups without trained tokens are not
counted.
"""

# B completions, T padded tokens, G groups

import torch

from arealite.algorithms.advantages import Reduce
from arealite.algorithms.ratios import check_choice


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

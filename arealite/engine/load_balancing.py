"""The load-balancing loss of experts (arXiv:2101.03961, equations 4 to 6), over the tokens of all ranks."""

# L layers, n tokens of a rank, E experts

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.utils.images import sees_images


def check_balanced(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Refuse `router_aux_loss_coef` for a model for which the loss can't be computed."""
    if not config.router_aux_loss_coef:
        return
    if ParallelSizes.from_str(config.parallel or "d1").pipeline > 1:
        found = f"{config.parallel}, whose stages have some routers each. Write p1 in allocation_mode"
    elif sees_images(model.config) or not hasattr(model.config, "router_aux_loss_coef"):
        found = f"{type(model).__name__}, for which transformers has no such loss. Remove it"
    else:
        return
    raise ConfigError(f"router_aux_loss_coef must be 0 for this model: got {found}.")


def balance_loss(
    logits: Sequence[torch.Tensor], num_real: int, model: PreTrainedModel, sizes: ParallelSizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the loss, with a gradient, and the loss over all ranks (collective).

    `logits [n, E]` are those of each layer's router; the first `num_real` tokens are no padding. The loss is
    `E * sum(share of tokens * mean probability)` over experts, the mean over layers: k where k experts of each token
    are used equally.
    """
    probs_LnE = torch.stack([layer.flatten(0, -2)[:num_real] for layer in logits]).float().softmax(-1)
    num_chosen, num_experts = model.config.num_experts_per_tok, probs_LnE.shape[-1]
    counts_LE = F.one_hot(probs_LnE.topk(num_chosen).indices, num_experts).sum((1, 2))
    own_LE = probs_LnE.sum(1)
    totals = torch.stack([counts_LE, own_LE.detach()]) / sizes.tensor  # ranks of t have the same tokens
    dist.all_reduce(totals)
    scale_LE = num_experts * totals[0] / (totals[0, :1].sum() / num_chosen).clamp(min=1) ** 2
    own, whole = ((scale_LE * sums_LE).sum(-1).mean() for sums_LE in (own_LE, totals[1]))
    return own, whole

"""What actor and critic are given: columns of a batch, and the results of a user's loss and advantage functions.

Without the checks of these results a mean, or a column `[N, 1]`, would be broadcast over tokens and train a different
objective.
"""

# B rows of this rank, N packed tokens, S completions of all ranks

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.algorithms.advantages import Samples
from arealite.algorithms.objectives import TokenLosses
from arealite.api.workflow_api import runs_of
from arealite.utils.distributed import of_all_ranks


def require_key(batch: TensorDict, key: str, because: str, remedy: str) -> torch.Tensor:
    """Return a column of the batch; ValueError if it is missing."""
    if key not in batch:
        raise ValueError(f"a batch must have {key!r} with {because}: got {sorted(batch.keys())}. {remedy}.")
    column: torch.Tensor = batch[key]
    return column


def finite_rewards(batch: TensorDict) -> torch.Tensor:
    """Return the rewards `[B]` in float32; one non-finite reward would spread over its group and skip the step."""
    rewards_B: torch.Tensor = batch["rewards"].float()
    if not (is_finite_B := rewards_B.isfinite()).all():
        raise ValueError(
            f"rewards must be finite: got {rewards_B[~is_finite_B][0].item()}. Fix the reward function, or reject such "
            "rows."
        )
    return rewards_B


def samples_of(batch: TensorDict, trained: torch.Tensor, groups: torch.Tensor, num_groups: int) -> Samples:
    """Return the samples of a batch with the mask `trained [B, T]`; the rows of a sample share its reward."""
    runs = runs_of(batch, groups)
    no_eos_B = batch["no_eos"].byte() if "no_eos" in batch else torch.zeros_like(groups, dtype=torch.uint8)
    return Samples(
        rewards=finite_rewards(batch)[runs.first_rows],
        groups=groups[runs.first_rows],
        num_groups=num_groups,
        num_tokens=runs.sum(trained.sum(dim=1)),
        num_sampled=runs.sum(batch["loss_mask"].sum(dim=1)),
        is_truncated=runs.max(no_eos_B).bool(),
        of_rows=runs.of_rows,
    )


def groups_of(batch: TensorDict, group_size: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
    """Return each row's group `[B]` in the global batch, numbered from 0 without gaps, and their number (collective).

    Without `group_index`, rows are whole groups of `group_size`, in order of ranks. ValueError if no rank has a row.
    """
    if "group_index" in batch:
        groups_B = batch["group_index"]
    else:
        num_rows = batch.batch_size[0]
        if num_rows % group_size or "sample_index" in batch:
            what = "with a sample_index, and so groups of any size" if "sample_index" in batch else num_rows
            raise ValueError(
                f"the rows of a rank must be a multiple of group_size {group_size}: got {what}. "
                "Give the batch a group_index, as prepare_batch does."
            )
        first = sum(of_all_ranks(num_rows // group_size, group)[: dist.get_rank(group)])
        groups_B = first + torch.arange(num_rows, device=batch["attention_mask"].device) // group_size
    known_G = torch.cat(of_all_ranks(groups_B.unique().cpu(), group)).unique().to(groups_B)
    if not len(known_G):
        raise ValueError("a batch must have a row on some rank: got none. Train on what prepare_batch returns.")
    return torch.searchsorted(known_G, groups_B), len(known_G)


_TAKEN = {"loss", "entropy", "ref_kl", "teacher_kl", "mismatch_kl", "ratio_max", "rollout_importance_weight"}
_TAKEN |= {"rollout_importance_weight_max", "rollout_importance_dropped_ratio"}
"""Names of the actor's own statistics."""
_NO_MEAN = "Leave out means and sums: the actor averages, as actor.aggregation says."


def checked_loss_fn(loss_fn: Callable[[torch.Tensor, Any], Any]) -> Callable[[torch.Tensor, Any], TokenLosses]:
    """Wrap a user's loss function with checks of its return value.

    Masked tokens of its inputs are 0: a NaN would survive a product with 0.
    """

    def checked(logprobs: torch.Tensor, batch: TensorDict) -> TokenLosses:
        mask_N = batch["loss_mask"]
        floats = {key: torch.where(mask_N, values, 0.0) for key, values in batch.items() if values.is_floating_point()}
        returned = loss_fn(torch.where(mask_N, logprobs, 0.0), batch.copy().update(floats))
        return _checked_losses(returned, logprobs, mask_N)

    return checked


def _checked_losses(returned: Any, logprobs: torch.Tensor, loss_mask: torch.Tensor) -> TokenLosses:
    """Return the token losses `[N]`, and statistics without gradient."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    if not is_pair:
        raise ValueError(
            f"loss_fn must return (token losses, statistics): got {_described(returned)}. End it with `return losses, "
            "{}`, or with statistics in the dict."
        )
    losses_N, statistics = returned
    _require_shape("loss_fn must return one loss per token", losses_N, logprobs, _NO_MEAN)
    if torch.is_grad_enabled() and not losses_N.requires_grad:
        raise ValueError(
            "loss_fn must return losses that depend on logprobs: got a tensor without gradient. Compute them from "
            "logprobs, not from logprobs.detach()."
        )
    wrong_N = loss_mask & ~losses_N.detach().isfinite()
    if wrong_N.any() and logprobs.detach()[loss_mask].isfinite().all():
        raise ValueError(
            f"loss_fn must return finite losses of trained tokens: got {losses_N[wrong_N][0].item()}. Clamp log ratios "
            "to +-20 before exp, and divide by nothing that can be 0."
        )
    for name, values in statistics.items():
        if name in _TAKEN:
            raise ValueError(
                f"a statistic of loss_fn must have a name of its own: got {name!r}, a metric of the actor. Rename it."
            )
        _require_shape(f"statistic {name!r} of loss_fn must have one value per token", values, logprobs, _NO_MEAN)
    return losses_N, {name: values.detach() for name, values in statistics.items()}


def checked_advantages(returned: Any, rewards: torch.Tensor) -> torch.Tensor:
    """Return the detached advantages `[S]` of a user's `advantage_fn`, of the dtype of `rewards [S]`."""
    _require_shape(
        "advantage_fn must return one advantage per completion", returned, rewards, "All tokens of one share it."
    )
    advantages_S = returned.detach().to(rewards)
    if not (is_finite_S := advantages_S.isfinite()).all():
        raise ValueError(
            f"advantage_fn must return finite advantages: got {advantages_S[~is_finite_S][0].item()}. Divide by "
            "nothing that can be 0, such as the deviation of a group of equal rewards."
        )
    return advantages_S


def _require_shape(rule: str, value: Any, like: torch.Tensor, advice: str) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.is_complex():
        raise ValueError(f"{rule}, a real tensor of shape {list(like.shape)}: got {_described(value)}. {advice}")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")

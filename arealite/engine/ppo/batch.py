"""Columns of a batch that actor and critic share: required keys, groups over all ranks, samples."""

# B rows of this rank

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.algorithms.advantages import Samples
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

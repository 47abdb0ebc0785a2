"""What actor and critic ask of a batch: its keys, and the groups of its rows over all ranks."""

# B rows of this rank

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.utils.distributed import of_all_ranks


def require_key(batch: TensorDict, key: str, because: str, remedy: str) -> None:
    if key not in batch:
        raise ValueError(f"a batch must have {key!r} with {because}: got {sorted(batch.keys())}. {remedy}.")


def finite_rewards(batch: TensorDict) -> torch.Tensor:
    """Return the rewards `[B]` in float32; one that is not finite would spread over its group, and skip the step."""
    rewards_B: torch.Tensor = batch["rewards"].float()
    if not (is_finite_B := rewards_B.isfinite()).all():
        raise ValueError(
            f"rewards must be finite: got {rewards_B[~is_finite_B][0].item()}. Fix the reward function, or reject such "
            "rows."
        )
    return rewards_B


def require_no_negative(rewards: torch.Tensor) -> None:
    """A group whose mean is 0 or below would have the advantages of another, or none."""
    if (rewards < 0).any():
        raise ValueError(
            f"rewards must be at least 0 with reward_scale group_mean: got {rewards.min().item():g}. Set "
            "actor.reward_scale=group_std, or a reward function that has none below 0."
        )


def groups_of(batch: TensorDict, group_size: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
    """Return each row's group `[B]` in the global batch, numbered from 0 without gaps, and their number (collective).

    Without `group_index`, rows are whole groups of `group_size`, rank after rank. ValueError if no rank has a row.
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

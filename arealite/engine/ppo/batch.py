"""What actor and critic ask of a batch: its keys, and the groups of its rows over all ranks."""

# B rows of this rank

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.utils.distributed import all_reduce, all_reduce_numbers


def require_key(batch: TensorDict, key: str, because: str, remedy: str) -> None:
    if key not in batch:
        raise ValueError(f"a batch must have {key!r} with {because}: got {sorted(batch.keys())}. {remedy}.")


def groups_of(batch: TensorDict, group_size: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
    """Return each row's group `[B]` in the global batch and the number of groups (collective).

    Without `group_index`, rows are whole groups of `group_size`, rank after rank. ValueError if no rank has a row.
    """
    if "group_index" in batch:
        groups_B = batch["group_index"]
    else:
        num_rows = batch.batch_size[0]
        if num_rows % group_size:
            raise ValueError(
                f"the rows of a rank must be a multiple of group_size {group_size}: got {num_rows}. "
                "Give the batch a group_index, as prepare_batch does."
            )
        counts = torch.zeros(dist.get_world_size(group))
        rank = dist.get_rank(group)
        counts[rank] = num_rows // group_size
        first = int(all_reduce(counts, group=group)[:rank].sum())
        groups_B = first + torch.arange(num_rows, device=batch["attention_mask"].device) // group_size
    num_groups = groups_B.max().item() + 1 if len(groups_B) else 0
    (num_on_all,) = all_reduce_numbers([num_groups], dist.ReduceOp.MAX, group)
    if num_on_all == 0:
        raise ValueError("a batch must have a row on some rank: got none. Train on what prepare_batch returns.")
    return groups_B, int(num_on_all)

"""The ranks of a model: who has which rows, and over which ranks each kind of parameter is split.

Ranks form p stages of d x c x t. The ranks of a block (one d) have the same rows: c of them divide the tokens, t divide
the layers. Dense parameters are split over t, then by FSDP over d x c; experts over e, then by FSDP over the others.
"""

import math
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.errors import ConfigError
from arealite.utils.distributed import all_reduce_numbers, mark_agreed

T = TypeVar("T")


class Mesh:
    """The groups of a rank (collective)."""

    def __init__(self, sizes: ParallelSizes, device: torch.device, timeout: timedelta, *, num_copies: int = 1) -> None:
        num_ranks, self.device, self.sizes = dist.get_world_size(), device, sizes
        if sizes.world_size != num_ranks:
            raise ConfigError(
                f"a trainer of {sizes} must have {sizes.world_size} ranks: got {num_ranks}. Start as many, or change "
                "the sizes in allocation_mode."
            )
        if sizes.data % num_copies:
            raise ConfigError(
                f"fsdp.dp_replicate must divide d of allocation_mode: got {num_copies} and {sizes}. Set it to the "
                "number of nodes, or to 1."
            )
        d, p, t, c, e = sizes.data, sizes.pipeline, sizes.tensor, sizes.context, sizes.expert
        self.data_rank = sizes.data_rank(dist.get_rank())
        places = torch.arange(num_ranks).view(p, d, c, t)
        self.data = _own_group(places.movedim(1, -1).reshape(-1, d), timeout)
        self.context = _own_group(places.movedim(2, -1).reshape(-1, c), timeout) if c > 1 else None
        self.stages = _own_group(places.movedim(0, -1).reshape(-1, p), timeout) if p > 1 else None
        self.ranks_of_stage = num_ranks // p
        self.stage = dist.get_rank() // self.ranks_of_stage
        shape = {"p": p, "dp_replicate": num_copies, "dp_shard": d // num_copies * c, "t": t}
        kept = [name for name, size in shape.items() if size > 1 or name == "dp_shard" or (name == "t" and e > 1)]
        whole = _mesh_of(device, {name: shape[name] for name in kept})
        self.dense = whole["dp_replicate", "dp_shard"] if num_copies > 1 else whole["dp_shard"]
        """Over which FSDP splits parameters that are no experts, and in copies of the model (HSDP) repeats them."""
        self.tensor: DeviceMesh | None = whole["t"] if "t" in kept else None
        self.experts: DeviceMesh | None = None
        """Over which experts are split: `dp_shard` by FSDP, and `e`."""
        if e > 1:
            shape = {"p": p, "dp_shard": num_ranks // p // e, "e": e}
            self.experts = _mesh_of(device, {name: size for name, size in shape.items() if size > 1 or name != "p"})

    @property
    def num_shards(self) -> int:
        """Ranks over which FSDP averages the gradient of a dense parameter."""
        return self.sizes.data * self.sizes.context

    def from_last_stage(self, value: T) -> T:
        """Return the value of the last stage on every stage (collective; pickled)."""
        if self.stages is None:
            return value
        box = [value]
        last = dist.get_process_group_ranks(self.stages)[-1]
        dist.broadcast_object_list(box, src=last, group=self.stages)
        return box[0]

    def require_same_rows(self, batch: TensorDict) -> None:
        """Refuse a batch that differs between the ranks of a block (collective): each would train on a part of it."""
        if self.sizes.block_size == 1:
            return
        ids_BS = batch["input_ids"].long()
        places_S = torch.arange(1, ids_BS.shape[1] + 1, device=ids_BS.device)
        found = int((ids_BS * batch["attention_mask"] * places_S).sum()) % 2**53, batch.batch_size[0]
        own = [float("-inf")] * 4 * self.sizes.data
        own[4 * self.data_rank : 4 * self.data_rank + 4] = [*map(float, found), *(-float(one) for one in found)]
        largest = torch.tensor(all_reduce_numbers(own, dist.ReduceOp.MAX)).view(-1, 2, 2)
        if not torch.equal(largest[:, 0], -largest[:, 1]):
            raise mark_agreed(
                ValueError(
                    f"the ranks of a replica must have the same rows with {self.sizes}: got others. Take batches from "
                    "prepare_batch, or pass parallel=config.actor.parallel to sft_batches."
                )
            )

    def leave(self) -> None:
        for group in (self.data, self.context, self.stages):
            if group is not None:
                dist.destroy_process_group(group)


def _mesh_of(device: torch.device, shape: dict[str, int]) -> DeviceMesh:
    assert math.prod(shape.values()) == dist.get_world_size(), "every rank has one place"
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _own_group(ranks: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of each row of ranks, and return this rank's."""
    groups = {tuple(row): dist.new_group(row, timeout=timeout) for row in ranks.tolist()}
    return next(group for row, group in groups.items() if dist.get_rank() in row)

"""Reads and writes a sharded model's weights and optimizer state: checkpoints, and buckets for servers.

Invariant: a rank on which writing or sending fails keeps gathering to the end, so that no rank waits for one that left,
and every rank raises.
"""

import itertools
import math
import os
import shutil
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arealite.api.errors import CheckpointError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.engine.hf_model import checkpoint_shapes, iter_full_params, shapes_by_parameter, write_checkpoint
from arealite.engine.lora import adapter_parameters, changing_parameters, write_adapter
from arealite.engine.optimizer import AdamW, optimizer_state
from arealite.engine.parallel.shards import every_parameter, gathered, is_split, place_in
from arealite.utils.distributed import agreed, all_reduce, of_all_ranks, on_rank_0, raise_on_every_rank
from arealite.utils.files import publish_folder
from arealite.utils.fingerprint import fingerprint, fingerprints, model_fingerprint
from arealite.utils.weight_transfer import (
    BroadcastGroup,
    buckets_without,
    close_group,
    group_of,
    host_group,
    join_group,
    send_bucket,
    senders_of,
)

OPTIMIZER_FOLDER = "optimizer"


def write_whole_model(model: PreTrainedModel, path: str, dtype: torch.dtype) -> None:
    """Write a Hugging Face checkpoint (collective)."""
    state = _gather(model, dtype)
    on_rank_0(lambda: write_checkpoint(model, state, path, dtype))


def write_whole_adapter(model: PreTrainedModel, path: str) -> None:
    """Write the adapter in PEFT's format, float32 (collective)."""
    whole = ((name, gathered(one, torch.float32, model._mesh)) for name, one in adapter_parameters(model).items())
    state = {name: tensor.to("cpu", copy=True) for name, tensor in whole if not tensor.is_meta}
    on_rank_0(lambda: write_adapter(model, state, path))


def publish_checkpoint(model: PreTrainedModel, meta: WeightUpdateMeta, dtype: torch.dtype) -> None:
    """Write a checkpoint, of all tensors or of those that can change, that appears at once at `meta.path`, in place of
    an existing one (collective)."""
    state = _gather(model, dtype, is_partial=meta.transfer.is_partial)
    torch.cuda.empty_cache()  # servers that wake up on this device need what the update took; nothing without one

    def publish() -> None:
        assert meta.path is not None, "an update through the disk needs a path"
        partial = f"{meta.path}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_checkpoint(model, state, partial, dtype)
        publish_folder(Path(partial), Path(meta.path))
        if meta.transfer.wants_fingerprints:
            meta.transfer.fingerprints |= fingerprints(state)

    on_rank_0(publish)


def _gather(model: PreTrainedModel, dtype: torch.dtype, *, is_partial: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors, or those that can change, on rank 0, none on others (collective)."""
    # A tensor may be a view of padded storage or of fused experts, which safetensors refuses: copy it out.
    params = iter_full_params(model, dtype, is_partial=is_partial)
    return {name: tensor.to("cpu", copy=True) for name, tensor in params if not tensor.is_meta}


class WeightSender:
    """This rank's part in updates by broadcast: the group in which it sends, from one update to the next.

    A failure closes it, so that the receivers fail at once; every rank raises, and the next update needs new groups.
    """

    def __init__(self) -> None:
        self.update = ""  # name of the groups of all senders
        self._group: BroadcastGroup | None = None  # None on a rank that sends nothing
        self._stores: list[Store] = []  # rank 0: of groups whose sender is another rank

    def send(self, model: PreTrainedModel, meta: WeightUpdateMeta, dtype: torch.dtype) -> None:
        """Gather each tensor to its owner, which sends it (collective)."""
        if self.update != meta.transfer.group_name:
            agreed(lambda: self._join(meta))
        error: Exception | None = None
        found: dict[str, str] = {}
        buckets = buckets_without(meta.nccl_param_specs, frozen_names(model) if meta.transfer.is_partial else ())
        owners = [spec.owner for bucket in buckets for spec in bucket]
        params = iter_full_params(model, dtype, is_partial=meta.transfer.is_partial, owners=owners)
        for specs in buckets:
            own = {name: one for name, one in itertools.islice(params, len(specs)) if not one.is_meta}
            if own and error is None:
                try:
                    if self._group is not None:
                        send_bucket(self._group, list(own.values()), timeout_s=meta.timeout_s)
                    if meta.transfer.wants_fingerprints:
                        found |= fingerprints(own)
                except Exception as caught:
                    error = caught
                    self.close()
        raise_on_every_rank(error)
        if meta.transfer.wants_fingerprints:
            for one in of_all_ranks(found):
                meta.transfer.fingerprints |= one

    def close(self) -> None:
        """Leave the group, and end the stores of others."""
        if self._group is not None:
            close_group(self._group)
        self.update, self._group, self._stores = "", None, []

    def _join(self, meta: WeightUpdateMeta) -> None:
        """Join the group of this rank, if it sends, in place of another; rank 0 listens for those of all senders."""
        self.close()
        rank, size, timeout_s = dist.get_rank(), meta.transfer.world_size, meta.timeout_s
        place = meta.transfer.meeting_point
        for num_before, sender in enumerate(senders_of(meta.nccl_param_specs)):
            name = group_of(meta.transfer.group_name, sender)
            if rank == 0 and sender != 0:
                self._stores.append(host_group(*place, size, name, num_before=num_before, timeout_s=timeout_s))
            elif rank == sender:
                more: Any = {"backend": meta.transfer.backend, "timeout_s": timeout_s, "is_hosted": rank != 0}
                self._group = join_group(*place, 0, size, name, **more)
        self.update = meta.transfer.group_name


def share_whole_model(model: PreTrainedModel, meta: WeightUpdateMeta, dtype: torch.dtype) -> None:
    """Hand all tensors to the server of rank 0's process (collective): its own parameters where it is the only rank,
    `dtype` is theirs and no adapter is merged, else copies."""
    weights = dict(iter_full_params(model, dtype))
    transfer = meta.transfer

    def share() -> None:
        assert transfer.shares is not None, "the receiving engine sets it"
        transfer.shares.share(weights, transfer.version)

    on_rank_0(share)


def fingerprint_shards(model: PreTrainedModel, *, only_frozen: bool = False) -> str:
    """Return one fingerprint of all parameters, or of those that are frozen (collective).

    A shard of FSDP is a run of rows, hence of elements, and fingerprints of runs add up to that of the whole. What t or
    e has split may have no such runs; it is gathered.
    """
    values: dict[str, int] = {}
    first_rank = model._mesh.stage * model._mesh.ranks_of_stage
    for name, parameter, place in every_parameter(model):
        if only_frozen and parameter.requires_grad:
            continue
        if place is not None:
            values[name] = 0
            continue
        assert isinstance(parameter, DTensor), f"{name} must be sharded"
        mesh, num_rows = parameter.device_mesh, parameter.shape[0]
        if is_split(parameter):
            whole = gathered(parameter, parameter.dtype, model._mesh, first_rank)
            values[name] = 0 if whole.is_meta else fingerprint(whole)
            continue
        *copy, rank = mesh.get_coordinate() or ()  # with HSDP, of which copy of the model
        first_row = min(rank * -(-num_rows // mesh.size(-1)), num_rows)  # FSDP splits like torch.chunk
        is_counted = not any(copy) and place_in(mesh, first_rank) is not None  # other ranks of t have the same
        local = parameter.to_local()
        values[name] = fingerprint(local, first_row * math.prod(parameter.shape[1:])) if is_counted else 0
    summands = torch.tensor([value - (value >> 63 << 64) for value in values.values()])  # int64 wraps as mod 2^64 does
    totals = all_reduce(summands).tolist()
    return model_fingerprint(dict(zip(values, totals, strict=True)))


def param_buckets(model: PreTrainedModel, dtype: str, max_bytes: int, num_senders: int) -> list[list[ParamSpec]]:
    """Return the specs of all tensors in send order, in buckets of at most `max_bytes`; a larger one gets its own.

    As many ranks as there are senders, evenly spaced, own their shares of each bucket.
    """
    num_ranks = dist.get_world_size()
    count = min(num_senders, num_ranks)
    senders = [index * num_ranks // count for index in range(count)]
    changing = {name for name, *_ in changing_parameters(model)}
    return list(shared_out(_filled(model, dtype, max_bytes), senders, changing))


def shared_out(
    buckets: Iterable[list[tuple[str, ParamSpec]]], senders: Sequence[int], changing: Container[str]
) -> Iterator[list[ParamSpec]]:
    """Give the tensors of a parameter, which comes with each spec, one owner: of every bucket all own about as many
    bytes, also of the parameters that are `changing`, which LoRA sends alone."""
    owners: dict[str, int] = {}  # by parameter, whose tensors may lie in several buckets
    for bucket in buckets:
        sizes, loads = Counter[str](), dict.fromkeys(senders, 0)
        for name, spec in bucket:
            sizes[name] += spec.size
        for name in sorted(sizes, key=lambda one: (one not in owners, one not in changing, -sizes[one])):
            owner = owners.setdefault(name, min(senders, key=loads.__getitem__))
            loads[owner] += sizes[name]
        yield [spec._replace(owner=owners[name]) for name, spec in bucket]


def _filled(model: PreTrainedModel, dtype: str, max_bytes: int) -> Iterator[list[tuple[str, ParamSpec]]]:
    """Yield buckets of the specs of all tensors, each with the name of its parameter."""
    bucket: list[tuple[str, ParamSpec]] = []
    free = max_bytes
    for name, shapes in shapes_by_parameter(model).items():
        for tensor, shape in shapes.items():
            spec = ParamSpec(tensor, shape, dtype)
            if bucket and spec.size > free:
                yield bucket
                bucket, free = [], max_bytes
            bucket.append((name, spec))
            free -= spec.size
    yield bucket


def frozen_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names, as in a checkpoint, of the tensors that partial updates leave out."""
    return frozenset(checkpoint_shapes(model).keys() - checkpoint_shapes(model, is_partial=True).keys())


def save_optimizer(model: PreTrainedModel, optimizer: AdamW, num_steps: int, path: str) -> None:
    """Write optimizer state and schedule so that any layout of ranks can read them (collective)."""
    state = {"optimizer": optimizer_state(model, optimizer), "num_steps": num_steps}
    state_dict_saver.save(state, checkpoint_id=os.path.join(path, OPTIMIZER_FOLDER))


def load_optimizer(model: PreTrainedModel, optimizer: AdamW, path: str) -> int:
    """Read the state that `save_optimizer` wrote (collective); return the number of steps of the schedule."""
    folder = os.path.join(path, OPTIMIZER_FOLDER)
    state: dict[str, Any] = {"optimizer": optimizer_state(model, optimizer), "num_steps": 0}
    try:
        state_dict_loader.load(state, checkpoint_id=folder)
    except CheckpointException as failed:
        raise CheckpointError(
            f"{folder} must hold the moments of every parameter: got {next(iter(failed.failures.values()))[0]}. Load "
            "the weights alone (with_optim=False), or use the version that saved it."
        ) from failed
    return int(state["num_steps"])

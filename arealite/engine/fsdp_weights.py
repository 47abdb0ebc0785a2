"""Reads and writes a sharded model's weights and optimizer state: checkpoints, and buckets for servers.

Invariant: when writing or sending fails on rank 0, it keeps gathering to the end, so that no rank waits for one that
left, and every rank raises.
"""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arealite.api.errors import CheckpointError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.engine.hf_model import checkpoint_shapes, gathered, iter_full_params, write_checkpoint
from arealite.engine.lora import adapter_parameters, write_adapter
from arealite.engine.optimizer import optimizer_state
from arealite.utils.distributed import all_reduce, on_rank_0, raise_on_every_rank
from arealite.utils.files import publish_folder
from arealite.utils.fingerprint import fingerprint, fingerprints, model_fingerprint
from arealite.utils.weight_transfer import BroadcastGroup, buckets_without, close_group, join_group, send_bucket

OPTIMIZER_FOLDER = "optimizer"


def write_whole_model(model: PreTrainedModel, path: str, dtype: torch.dtype) -> None:
    """Write a Hugging Face checkpoint (collective)."""
    state = _gather(model, dtype)
    on_rank_0(lambda: write_checkpoint(model, state, path, dtype))


def write_whole_adapter(model: PreTrainedModel, path: str) -> None:
    """Write the adapter in PEFT's format, float32 (collective)."""
    whole = ((name, gathered(one, torch.float32)) for name, one in adapter_parameters(model).items())
    state = {name: tensor.to("cpu", copy=True) for name, tensor in whole if dist.get_rank() == 0}
    on_rank_0(lambda: write_adapter(model, state, path))


def publish_checkpoint(model: PreTrainedModel, meta: WeightUpdateMeta, dtype: torch.dtype) -> None:
    """Write a checkpoint, of all tensors or of those that can change, that appears at once at `meta.path`, in place of
    an existing one (collective)."""
    state = _gather(model, dtype, is_partial=meta.is_partial)

    def publish() -> None:
        _publish(model, state, meta, dtype)
        if meta.wants_fingerprints:
            meta.fingerprints |= fingerprints(state)

    on_rank_0(publish)


def _gather(model: PreTrainedModel, dtype: torch.dtype, *, is_partial: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors, or those that can change, on rank 0, none on others (collective)."""
    # A tensor may be a view of padded storage or of fused experts, which safetensors refuses: copy it out.
    params = iter_full_params(model, dtype, is_partial=is_partial)
    return {name: tensor.to("cpu", copy=True) for name, tensor in params if dist.get_rank() == 0}


def _publish(
    model: PreTrainedModel, state: dict[str, torch.Tensor], meta: WeightUpdateMeta, dtype: torch.dtype
) -> None:
    assert meta.path is not None, "an update through the disk needs a path"
    partial = f"{meta.path}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write_checkpoint(model, state, partial, dtype)
    publish_folder(Path(partial), Path(meta.path))


def send_weights(
    model: PreTrainedModel, meta: WeightUpdateMeta, dtype: torch.dtype, group: BroadcastGroup | None
) -> BroadcastGroup | None:
    """Send the buckets (collective) over `group`, or over the one in `meta` if that has a new name.

    Receivers outside of the group get a checkpoint. Returns rank 0's group for the next time. A failure closes it, so
    that the receivers fail at once.
    """
    error: Exception | None = None
    state: dict[str, torch.Tensor] = {}
    params = iter_full_params(model, dtype, is_partial=meta.is_partial)
    buckets = buckets_without(meta.nccl_param_specs, frozen_names(model) if meta.is_partial else ())
    for specs in buckets:
        tensors = [tensor for _, tensor in (next(params) for _ in specs)]
        if dist.get_rank() == 0 and error is None:
            try:
                if meta.nccl_world_size > 1:
                    group = _joined(meta, group)
                    send_bucket(group, tensors, timeout_s=meta.timeout_s)
                if meta.wants_fingerprints:
                    meta.fingerprints |= fingerprints({spec.name: one for spec, one in zip(specs, tensors)})
                if meta.also_disk:
                    state |= {spec.name: one.to("cpu", copy=True) for spec, one in zip(specs, tensors)}
                    if specs is buckets[-1]:
                        _publish(model, state, meta, dtype)
            except Exception as caught:
                error = caught
    if error is not None and group is not None:
        close_group(group)
    raise_on_every_rank(error)
    return group


def share_whole_model(model: PreTrainedModel, meta: WeightUpdateMeta, dtype: torch.dtype) -> None:
    """Hand all tensors to the server of rank 0's process (collective): its own parameters where it is the only rank,
    `dtype` is theirs and no adapter is merged, else copies."""
    weights = dict(iter_full_params(model, dtype))
    version, shares = meta.version, meta.shares

    def share() -> None:
        assert shares is not None and version is not None, "the receiving engine fills them in"
        shares.share(weights, version)

    on_rank_0(share)


def _joined(meta: WeightUpdateMeta, group: BroadcastGroup | None) -> BroadcastGroup:
    """Return the group named in `meta`; close a previous one."""
    if group is not None and group.name == meta.nccl_group_name:
        return group
    if group is not None:
        close_group(group)
    return join_group(
        meta.nccl_master_address,
        meta.nccl_master_port,
        rank=0,
        world_size=meta.nccl_world_size,
        name=meta.nccl_group_name,
        backend=meta.nccl_backend,
        timeout_s=meta.timeout_s,
    )


def fingerprint_shards(model: PreTrainedModel, *, only_frozen: bool = False) -> str:
    """Return one fingerprint of all parameters, or of those that are frozen, without gathering them (collective).

    A shard is a run of rows, hence of elements, and fingerprints of runs add up to that of the whole.
    """
    values: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if only_frozen and parameter.requires_grad:
            continue
        assert isinstance(parameter, DTensor), f"{name} must be sharded"
        mesh, num_rows = parameter.device_mesh, parameter.shape[0]
        *copy, rank = mesh.get_coordinate() or ()  # with HSDP, of which copy of the model
        first_row = min(rank * -(-num_rows // mesh.size(-1)), num_rows)  # FSDP splits like torch.chunk
        is_counted = not any(copy)
        local = parameter.to_local()
        values[name] = fingerprint(local, first_row * math.prod(parameter.shape[1:])) if is_counted else 0
    summands = torch.tensor([value - (value >> 63 << 64) for value in values.values()])  # int64 wraps as mod 2^64 does
    totals = all_reduce(summands).tolist()
    return model_fingerprint(dict(zip(values, totals, strict=True)))


def param_buckets(model: PreTrainedModel, dtype: str, max_bytes: int) -> list[list[ParamSpec]]:
    """Return the specs of all tensors in send order, in buckets of at most `max_bytes`; a larger one gets its own."""
    specs = [ParamSpec(name, shape, dtype) for name, shape in checkpoint_shapes(model).items()]
    buckets: list[list[ParamSpec]] = []
    free = 0
    for spec in specs:
        if not buckets or spec.size > free:
            buckets.append([])
            free = max_bytes
        buckets[-1].append(spec)
        free -= spec.size
    return buckets


def frozen_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names, as in a checkpoint, of the tensors that partial updates leave out."""
    return frozenset(checkpoint_shapes(model).keys() - checkpoint_shapes(model, is_partial=True).keys())


def save_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, num_steps: int, path: str) -> None:
    """Write optimizer state and schedule so that any number of ranks can read them (collective)."""
    state = {"optimizer": optimizer_state(model, optimizer), "num_steps": num_steps}
    state_dict_saver.save(state, checkpoint_id=os.path.join(path, OPTIMIZER_FOLDER))


def load_optimizer(model: PreTrainedModel, optimizer: torch.optim.Optimizer, path: str) -> int:
    """Read the state that `save_optimizer` wrote (collective); return the number of steps of the schedule."""
    folder = os.path.join(path, OPTIMIZER_FOLDER)
    state: dict[str, Any] = {"optimizer": optimizer_state(model, optimizer), "num_steps": 0}
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    num_saved = sum(key.startswith("optimizer.param_groups.") and key.endswith(".lr") for key in saved)
    if num_saved != len(optimizer.param_groups):
        raise CheckpointError(
            f"{folder} must hold an optimizer of {len(optimizer.param_groups)} parameter groups (norms and biases do "
            f"not decay): got {num_saved}, as older versions wrote. Load the weights alone (with_optim=False), or use "
            "the version that saved it."
        )
    state_dict_loader.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(state["num_steps"])

"""Parameters in parts: split over the ranks of a mesh, filled from rank 0, gathered again, and their gradients' norm.

A parameter is split over t or e first, by the plan of its model, then by FSDP along its first dimension. Each
transformer layer is gathered separately; parameters outside of layers (embeddings, last norm, output layer) are
gathered together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.engine.parallel.layers import split_layers
from arealite.engine.parallel.mesh import Mesh
from arealite.engine.parallel.pipeline import Elsewhere, cut
from arealite.utils.distributed import all_reduce_numbers
from arealite.utils.images import sees_images


def shard(model: PreTrainedModel, config: TrainEngineConfig, device: torch.device, mesh: Mesh) -> list[str]:
    """Prepare the layers of a model on the meta device to run as configured, and split it over all ranks.

    Return the names of the parameters whose gradients are sums over t.
    """
    model._names, model._mesh = cut(model, mesh), mesh
    layers = _layers_to_wrap(model, config)
    experts, partial = split_layers(model, mesh)
    compiled = {*(model.get_decoder() if sees_images(model.config) else model).modules()}  # towers loop over images
    for layer in layers:
        if config.torch_compile and layer in compiled:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if config.gradient_checkpointing:
            pins = device.type == "cuda" if config.activation_offloading else None
            layer.forward = functools.partial(_recomputed, layer, layer.forward, pins)
    offload = OffloadPolicy()
    if config.fsdp.offload_params:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    dtype, reduce_dtype = getattr(torch, config.dtype), getattr(torch, config.grad_reduce_dtype)
    outer_dtype = torch.float32 if config.cast_lm_head_to_fp32 else dtype  # layers cast their inputs
    for module in (*experts, *layers, model):
        precision = MixedPrecisionPolicy(outer_dtype if module is model else dtype, reduce_dtype)
        own = mesh.experts["dp_shard"] if module in experts and mesh.experts is not None else mesh.dense
        fully_shard(module, mesh=own, mp_policy=precision, offload_policy=offload)
    for module in experts:  # a rank has the tokens of e ranks, so the sum over the others is the sum over all
        module.set_gradient_divide_factor(float(mesh.num_shards))
        if mesh.experts is not None and mesh.experts["dp_shard"].size() > 1:
            module.set_force_sum_reduction_for_comms(True)
    return partial


def _layers_to_wrap(model: PreTrainedModel, config: TrainEngineConfig) -> list[Any]:
    """Return the modules to shard separately: of the configured classes, else of those that the model declares."""
    policy = config.fsdp.wrap_policy
    names = set(model._no_split_modules or ())
    if policy is not None and policy.transformer_layer_cls_to_wrap is not None:
        names = set(policy.transformer_layer_cls_to_wrap)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"fsdp.wrap_policy must name layer classes of {type(model).__name__}: got {sorted(names)}. "
            "Set fsdp.wrap_policy.transformer_layer_cls_to_wrap to the class of its transformer layer."
        )
    return layers


def _recomputed(
    layer: torch.nn.Module, forward: Callable[..., Any], pins: bool | None, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer; in training, keep only its input and recompute activations in the backward pass.

    The input is offloaded to the host, in pinned memory if `pins`; it stays on the device if `pins` is None.
    """
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if pins is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    with save_on_cpu(pin_memory=pins):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def every_parameter(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Elsewhere | None]]:
    """Yield the parameters of the whole model: this rank's shards, or what stands for those of another stage."""
    own = dict(model.named_parameters())
    for name, place in getattr(model, "_names", dict.fromkeys(own)).items():
        if place is None and name in own:
            yield name, own[name], None
        elif place is not None and isinstance(place.tensor, torch.nn.Parameter):
            yield name, place.tensor, place


@torch.no_grad()
def copy_from_rank0(model: PreTrainedModel, whole: PreTrainedModel | None, device: torch.device) -> None:
    """Fill a sharded model on every rank from the whole model that only rank 0 passes (collective)."""
    ours, theirs = _tensors(model), {} if whole is None else _tensors(whole)
    for name, place in model._names.items():
        tensor = ours[name] if place is None else place.tensor
        if whole is None:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        else:
            full = theirs[name].to(device, tensor.dtype)
        dist.broadcast(full, src=0)
        if isinstance(tensor, DTensor):
            shard = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(shard.to_local())
        elif place is None:
            assert not isinstance(tensor, torch.nn.Parameter), f"{name} must be sharded"
            tensor.copy_(full)


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@torch.no_grad()
def gathered(
    parameter: torch.Tensor, dtype: torch.dtype, mesh: Mesh, owner: int = 0, place: Elsewhere | None = None
) -> torch.Tensor:
    """Return a sharded parameter whole on rank `owner`, and on the meta device of others (collective).

    A parameter of another stage is at its `place`.
    """
    stage = mesh.stage if place is None else place.stage
    counterpart = stage * mesh.ranks_of_stage + owner % mesh.ranks_of_stage  # of the owner, in that stage
    whole = torch.empty(parameter.shape, dtype=dtype, device="meta")
    if place is None:
        whole = _gathered(parameter, dtype, counterpart)
    if counterpart == owner or dist.get_rank() not in (counterpart, owner):
        return whole
    if dist.get_rank() == counterpart:
        dist.send(whole.contiguous(), owner, group=mesh.stages)
        return whole.to("meta")
    received = torch.empty(parameter.shape, dtype=dtype, device=mesh.device)
    dist.recv(received, counterpart, group=mesh.stages)
    return received


def _gathered(parameter: torch.Tensor, dtype: torch.dtype, owner: int) -> torch.Tensor:
    """Return a sharded parameter whole on a rank of its stage (collective over the stage)."""
    assert isinstance(parameter, DTensor), "parameters must be sharded"
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    part = parameter.to_local().to(device=mesh.device_type, dtype=dtype)
    nothing = torch.empty(parameter.shape, dtype=dtype, device="meta")
    if (place_of_owner := place_in(mesh, owner)) is None:
        return nothing
    mine = mesh.get_coordinate() or ()
    shape = _shape_before_fsdp(parameter)
    order = sorted(range(mesh.ndim), key=lambda dim: names[dim] in _OUTER)  # FSDP was the last to split
    for dim in order:
        target, placement = place_of_owner[dim], _placement(parameter, dim)
        if isinstance(placement, Replicate):
            if mine[dim] != target:
                return nothing
            continue
        along, size = placement.dim, (parameter.shape if names[dim] in _OUTER else shape)[placement.dim]
        joined = _joined(part, along, size, mesh.get_group(dim), target)
        if joined is None:
            return nothing
        part = joined
    return part


@functools.lru_cache
def place_in(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    """Return the coordinates of a rank in a mesh; None where other ranks have the same parts. `mesh.mesh` is slow."""
    places = (mesh.mesh == rank).nonzero().tolist()
    return tuple(places[0]) if places else None


_OUTER = ("t", "e")  # of a mesh: split a parameter before FSDP does


def is_split(parameter: DTensor) -> bool:
    """Tell whether more than FSDP splits a parameter."""
    return not set(_OUTER).isdisjoint(parameter.device_mesh.mesh_dim_names or ())


def _placement(parameter: DTensor, dim: int) -> Any:
    return parameter.placements[dim]


def _shape_before_fsdp(parameter: DTensor) -> list[int]:
    """Return the shape of this rank's part of a parameter before FSDP splits it further."""
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    for dim, (name, place) in enumerate(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)):
        placement = _placement(parameter, dim)
        if name in _OUTER and not isinstance(placement, Replicate):
            size, num = shape[placement.dim], mesh[name].size()
            each = -(-size // num)  # as torch.chunk
            shape[placement.dim] = min(each, max(0, size - place * each))
    return shape


def _joined(part: torch.Tensor, along: int, size: int, group: dist.ProcessGroup, target: int) -> torch.Tensor | None:
    """Return the parts of a dimension of `size` as one on a rank of a group, None on others."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return part
    each = -(-size // len(ranks))  # as torch.chunk
    padded = part.new_zeros(*part.shape[:along], each, *part.shape[along + 1 :])
    padded.narrow(along, 0, part.shape[along]).copy_(part)
    if dist.get_rank() != ranks[target]:
        dist.gather(padded, dst=ranks[target], group=group)
        return None
    parts = padded.new_empty(len(ranks), *padded.shape)
    dist.gather(padded, list(parts), dst=ranks[target], group=group)
    return parts.movedim(0, along).flatten(along, along + 1).narrow(along, 0, size)


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of small parameters over a group, which has the same parts of them (collective)."""
    parts = [one.grad.to_local() for one in parameters if isinstance(one.grad, DTensor)]
    if parts:
        total = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(total, group=group)
        for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], largest: float, mesh: Mesh) -> float:
    """Scale all gradients so that their joint norm is at most `largest`; return the norm before (collective)."""
    kinds: dict[int, list[torch.Tensor]] = {}  # gradients by the number of ranks that have different parts
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            sizes = zip(parameter.grad.device_mesh.shape, parameter.grad.placements, strict=True)
            num_parts = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
            kinds.setdefault(num_parts, []).append(parameter.grad.to_local())
    norms = {num_parts: torch.nn.utils.get_total_norm(gradients).double() for num_parts, gradients in kinds.items()}
    square = float(sum(norm**2 * num_parts / mesh.ranks_of_stage for num_parts, norm in norms.items()))
    norm = math.sqrt(all_reduce_numbers([square])[0])
    if (factor := largest / (norm + 1e-6)) < 1.0:
        for gradients in kinds.values():
            torch._foreach_mul_(gradients, factor)
    return norm

"""Sharding with FSDP2, and options of layers: recomputed, offloaded, compiled.

Each transformer layer is gathered separately; parameters outside of layers (embeddings, last norm, output layer) are
gathered together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arealite.api.cli_args import FSDPEngineConfig, TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.utils.images import sees_images


def shard(model: PreTrainedModel, config: TrainEngineConfig, device: torch.device) -> None:
    """Prepare the layers of a model on the meta device to run as configured, and shard it over all ranks."""
    layers = _layers_to_wrap(model, config)
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
    mesh = _mesh(config.fsdp, device)
    for module in (*layers, model):
        precision = MixedPrecisionPolicy(outer_dtype if module is model else dtype, reduce_dtype)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)


def _mesh(config: FSDPEngineConfig, device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks, or of replicas times the ranks of a replica."""
    num_ranks, num_copies = dist.get_world_size(), config.dp_replicate
    if num_ranks % num_copies:
        raise ConfigError(
            f"fsdp.dp_replicate must divide the number of trainer ranks: got {num_copies} and {num_ranks}. Set it to "
            "the number of nodes, or to 1."
        )
    if num_copies == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("dp_shard",))
    shape = (num_copies, num_ranks // num_copies)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def _layers_to_wrap(model: PreTrainedModel, config: TrainEngineConfig) -> list[torch.nn.Module]:
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


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability to 0, also those that a module passes to a function."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)

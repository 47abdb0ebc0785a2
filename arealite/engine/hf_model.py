"""Hugging Face models in training: built on the meta device, filled from rank 0, written as checkpoints.

Only rank 0 holds a whole model. Invariant: after `copy_from_rank0` all ranks have the parameters and buffers of rank
0's model, including buffers that checkpoints omit.
"""

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from arealite.engine.lora import ADAPTER, HEAD, base_parameters, changing_parameters, is_adapter
from arealite.engine.packed_attention import check_packable
from arealite.engine.vision import attention_of_parts
from arealite.utils.files import writing
from arealite.utils.hf import as_in_checkpoint, auto_class, load_model, sdpa_required
from arealite.utils.images import sees_images


def build_meta_model(path: str, attention: str, *, has_value_head: bool = False) -> PreTrainedModel:
    """Build the float32 architecture of a folder or hub id on the meta device.

    With `has_value_head` it is a sequence classifier with one label, also for the folder of a language model.
    """
    if not os.path.isdir(path) and (not path or path[0] in "./~"):
        raise ValueError(f"path of a model must be an existing folder or a hub id: got {path!r}. Correct actor.path.")
    kind, config = _kind_and_config(path, has_value_head)
    with torch.device("meta"), sdpa_required():
        parts = attention_of_parts(attention) if sees_images(config) else attention
        model = kind.from_config(config, attn_implementation=parts, dtype=torch.float32, trust_remote_code=False)
    check_packable(model)
    conversions = get_model_conversion_mapping(model, add_legacy=False)  # before sharding renames the class
    model._weight_conversions = [rule for rule in conversions if not isinstance(rule, PrefixChange)]
    parameters = dict(model.named_parameters())
    if as_in_checkpoint(model, parameters).keys() != revert_weight_conversion(model, parameters).keys():
        raise ValueError(
            f"every tensor of a checkpoint must come from one parameter of the model: got {type(model).__name__}, "
            "which can't be saved parameter by parameter. Train another architecture."
        )
    model.config.architectures = [type(model).__name__]
    if model.can_generate():
        with contextlib.suppress(OSError):  # optional; it may list more end-of-sequence tokens than the config
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def load_whole_model(
    path: str, *, has_value_head: bool = False, init_from_scratch: bool = False, seed: int = 1
) -> PreTrainedModel:
    """Load a whole model in float32 on the CPU, or with random weights that depend on `seed` only.

    The value head starts at 0 unless the folder has one.
    """
    transformers_logging.disable_progress_bar()
    kind, config = _kind_and_config(path, has_value_head)
    if init_from_scratch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
        missing = {HEAD} if has_value_head else set()
    else:
        has_head = is_classifier(config)
        with contextlib.ExitStack() as quietly:  # a missing or unused value head is expected
            quietly.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
            transformers_logging.set_verbosity_error()
            model, info = load_model(kind, path, config=config, dtype=torch.float32, output_loading_info=True)
        missing = set(info["missing_keys"])  # randomly initialised by transformers
        if unknown := sorted(missing - ({HEAD} if has_value_head and not has_head else set())):
            raise ValueError(
                f"the checkpoint {path} must have every tensor of {type(model).__name__}: got {len(unknown)} missing, "
                f"{', '.join(unknown[:3])}. Save or download it again."
            )
    if HEAD in missing:
        torch.nn.init.zeros_(model.get_parameter(HEAD))
    return model


def model_config(path: str) -> PreTrainedConfig:
    """Return the config of a model in a folder or of a hub id; ValueError for an adapter."""
    if is_adapter(path):
        raise ValueError(
            f"path of a model must hold a whole model: got {path}, an adapter. Save with lora.merge_on_save: true, or "
            "merge it with PEFT."
        )
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return config


def _kind_and_config(path: str, has_value_head: bool) -> tuple[Any, PreTrainedConfig]:
    """Return the auto class of a folder or hub id and the config for it."""
    config = model_config(path)
    if not has_value_head:
        return auto_class(config), config
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"a critic or reward model must have a sequence classifier in transformers: got {config.model_type}, which "
            "has none. Use a model of the Qwen2, Qwen3, Llama or Mistral type."
        )
    if is_classifier(config) and config.num_labels != 1:
        raise ValueError(
            f"a critic or reward model must have one label: got {config.num_labels} in {path}. Use another model."
        )
    config.num_labels = 1
    return AutoModelForSequenceClassification, config


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return True for the checkpoint of a sequence classifier, which includes a head."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


@torch.no_grad()
def copy_from_rank0(model: torch.nn.Module, whole: torch.nn.Module | None, device: torch.device) -> None:
    """Fill a sharded model on every rank from the whole model that only rank 0 passes (collective)."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} must be sharded"
        if whole is None:
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            full = whole.get_parameter(name).to(device, parameter.dtype)
        shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    for name, buffer in model.named_buffers():
        values = buffer.to(device) if whole is None else whole.get_buffer(name).to(device, buffer.dtype)
        dist.broadcast(values, src=0)
        buffer.copy_(values)


@torch.no_grad()
def iter_full_params(
    model: PreTrainedModel, dtype: torch.dtype, *, is_partial: bool = False, owners: Sequence[int] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, or those alone that can change, as in a checkpoint, adapters merged (collective).

    Each is whole on one rank, by default 0, and on the meta device of others: `owners` are the ranks of all tensors,
    equal for those of a parameter. Tied embeddings come once.
    """
    num_yielded = 0
    for name, parameter, layer in (changing_parameters if is_partial else base_parameters)(model):
        owner = owners[num_yielded] if owners else 0
        whole = gathered(parameter, dtype if layer is None else parameter.dtype, owner)
        if layer is not None:
            a, b = (gathered(one[ADAPTER].weight, torch.float32, owner) for one in (layer.lora_A, layer.lora_B))
            whole = torch.addmm(whole.float(), b, a, alpha=layer.scaling[ADAPTER]).to(dtype)
        tensors = as_in_checkpoint(model, {name: whole})
        num_yielded += len(tensors)
        yield from tensors.items()


@torch.no_grad()
def gathered(parameter: torch.Tensor, dtype: torch.dtype, owner: int = 0) -> torch.Tensor:
    """Return a sharded parameter whole on rank `owner`, and on the meta device of others (collective)."""
    assert isinstance(parameter, DTensor), "parameters must be sharded"
    mesh = parameter.device_mesh
    group = mesh.get_group(mesh.ndim - 1)  # with HSDP, of the ranks that share a copy of the model
    num_shards, num_rows = dist.get_world_size(group), parameter.shape[0]
    shard = parameter.to_local().to(device=mesh.device_type, dtype=dtype)
    if num_shards == 1 and dist.get_rank() == owner:
        return shard
    if owner in dist.get_process_group_ranks(group):
        rows_each = -(-num_rows // num_shards)  # FSDP splits like torch.chunk
        padded = shard.new_zeros(rows_each, *shard.shape[1:])
        padded[: len(shard)] = shard
        if dist.get_rank() == owner:
            whole = shard.new_empty(num_shards * rows_each, *shard.shape[1:])
            dist.gather(padded, list(whole.split(rows_each)), dst=owner, group=group)
            return whole[:num_rows]
        dist.gather(padded, dst=owner, group=group)
    return torch.empty(parameter.shape, dtype=dtype, device="meta")


def checkpoint_shapes(model: PreTrainedModel, *, is_partial: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters as in a checkpoint, in the order of `iter_full_params`."""
    return {name: shape for shapes in shapes_by_parameter(model, is_partial).values() for name, shape in shapes.items()}


def shapes_by_parameter(model: PreTrainedModel, is_partial: bool = False) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each parameter, the shapes of its tensors in a checkpoint."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter, _ in (changing_parameters if is_partial else base_parameters)(model):
        tensors = as_in_checkpoint(model, {name: torch.empty(parameter.shape, device="meta")})
        found[name] = {one: tuple(tensor.shape) for one, tensor in tensors.items()}
    return found


def write_checkpoint(model: PreTrainedModel, state: dict[str, torch.Tensor], path: str, dtype: torch.dtype) -> None:
    """Write `state`, whole tensors in `dtype` by their names in a Hugging Face checkpoint, as one."""
    os.makedirs(path, exist_ok=True)
    with writing(path, SafetensorError):
        save_torch_state_dict(state, path)
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)
    if model.can_generate():
        # save_pretrained would refuse unusual settings
        model.generation_config.to_json_file(os.path.join(path, "generation_config.json"))

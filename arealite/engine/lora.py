"""Low-rank adapters by PEFT (arXiv:2106.09685): W + alpha / rank * B A replaces W, and only A and B are trained.

Adapters are added to the model's own layers. Other parameters, except a value head, are frozen in the compute dtype.
Checkpoints contain only the adapters, in PEFT's format; servers, and checkpoints with `merge_on_save`, get merged
weights.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import CheckpointError, ConfigError
from arealite.engine.parallel.pipeline import Elsewhere
from arealite.engine.parallel.shards import every_parameter
from arealite.utils.files import writing

HEAD = "score.weight"  # of a sequence classifier, in every model family; always fully trained
ADAPTER = "default"  # PEFT's name of the only adapter
_BASE = ".base_layer."  # part of the parameter names of an adapted layer
FILE, _SETTINGS, _PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."


def add_adapters(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Freeze a model and add adapters. A depends only on `config.seed`, B is 0; both are float32."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("peft must be installed for lora: it is not. Run `pip install 'arealite[lora]'`.") from error
    lora, is_lm = config.lora, model.get_output_embeddings() is not None
    assert lora is not None, "only for a model with LoRA"
    if fused := [name for name, parameter in model.named_parameters() if parameter.ndim > 2]:
        raise ValueError(
            f"weights of a model with LoRA must be matrices: got {fused[0]}, such as the fused experts of a layer. "
            "Train a dense model, or remove the lora block."
        )
    targets = lora.target_modules
    settings = LoraConfig(
        task_type="CAUSAL_LM" if is_lm else "SEQ_CLS",
        base_model_name_or_path=config.path,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            inject_adapter_in_model(settings, model)
            refused = _refused(model, targets)
        except (ValueError, re.error) as error:  # no match, or a match that is not a layer
            refused = [f"{targets} ({error})"]
    if refused:
        raise ValueError(
            f"lora.target_modules must match linear layers of {type(model).__name__}, not its output layer or "
            f"embeddings: got {', '.join(refused[:3])}. Set it to all-linear or to a list of ends of names, "
            "[q_proj, v_proj]."
        )
    for name, parameter in model.named_parameters():
        if name == HEAD:
            parameter.requires_grad_(True)
        elif not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, config.dtype))


def _refused(model: PreTrainedModel, targets: str | list[str]) -> list[str]:
    """Return adapted modules that must not be adapted, and targets without a match."""
    layers = adapted_layers(model)
    outer = (model.get_output_embeddings(), getattr(model, "score", None))  # their weight is used without the layer
    linear = torch.nn.Linear
    refused = [name for name, layer in layers.items() if layer in outer or type(layer.base_layer) is not linear]
    ends = [] if isinstance(targets, str) else targets
    return [*refused, *(end for end in ends if not any(f".{name}".endswith(f".{end}") for name in layers))]


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def base_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Elsewhere | None, Any]]:
    """Yield parameters with their names in the model without adapters, their place if another stage has them, and the
    layer of an adapted weight."""
    layers = adapted_layers(model)
    for name, parameter, place in every_parameter(model):
        if ".lora_" not in name:
            layer, _, leaf = name.rpartition(_BASE)
            yield name.replace(_BASE, "."), parameter, place, layers[layer] if layer and leaf == "weight" else None


def changing_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Elsewhere | None, Any]]:
    """Yield the `base_parameters` that a partial update sends: trained ones, and all layers next to an adapted layer.

    vLLM fuses some of them (query, key and value) and can load them only together.
    """
    blocks = {name.rpartition(".")[0] for name in adapted_layers(model)}
    for name, parameter, place, layer in base_parameters(model):
        if parameter.requires_grad or name.rpartition(".")[0].rpartition(".")[0] in blocks:
            yield name, parameter, place, layer


def adapter_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by their names in PEFT's files."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {_PREFIX + name.replace(f".{ADAPTER}.", "."): parameter for name, parameter in trained}


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.scale_layer(0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.unscale_layer()


def set_scale(model: PreTrainedModel, scale: float) -> None:
    """Set the scale of the adapters, also of those that are written from now on."""
    for layer in adapted_layers(model).values():
        layer.scaling[ADAPTER] = scale
    model.peft_config[ADAPTER].lora_alpha = scale * model.peft_config[ADAPTER].r


def write_adapter(model: PreTrainedModel, state: dict[str, torch.Tensor], path: str) -> None:
    """Write the whole `adapter_parameters` as a folder that `PeftModel.from_pretrained` loads."""
    os.makedirs(path, exist_ok=True)
    with writing(path, SafetensorError):
        save_file(state, Path(path) / FILE, {"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(path)


def is_adapter(path: str) -> bool:
    """Return True for the folder of an adapter."""
    return (Path(path) / _SETTINGS).is_file()


@torch.no_grad()
def read_adapter(model: PreTrainedModel, path: str) -> None:
    """Copy the adapter of a folder into a whole model with adapters of the same shapes and scale."""
    state, expected = load_file(Path(path) / FILE), adapter_parameters(model)
    alpha, ours = json.loads((Path(path) / _SETTINGS).read_text())["lora_alpha"], model.peft_config[ADAPTER].lora_alpha
    shapes, own = ({name: tensor.shape for name, tensor in tensors.items()} for tensors in (state, expected))
    if shapes != own or alpha != ours:
        raise CheckpointError(
            f"{path} must hold an adapter with the layers, rank and alpha of the lora block: got {len(state)} tensors "
            f"and alpha {alpha} instead of {len(own)} and {ours}, or other shapes. Use the configuration of the run."
        )
    for name, parameter in expected.items():
        parameter.copy_(state[name])

"""Hugging Face models in training: built on the meta device, written as checkpoints; `engine/parallel` shards them.

Only rank 0 holds a whole model. Loss functions get lazy logits from hidden states and the output layer, or the values
of a classifier. Logits must be `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`, or a model is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
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
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging as transformers_logging

from arealite.algorithms.logprobs import LazyLogits, Split, rows_of_all
from arealite.engine.lora import ADAPTER, HEAD, base_parameters, changing_parameters, is_adapter
from arealite.engine.packed_attention import attention_of_parts, check_packable, decoder_states
from arealite.engine.parallel.pipeline import decoder_of
from arealite.engine.parallel.shards import gathered
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
def iter_full_params(
    model: PreTrainedModel, dtype: torch.dtype, *, is_partial: bool = False, owners: Sequence[int] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, or those alone that can change, as in a checkpoint, adapters merged (collective).

    Each is whole on one rank, by default 0, and on the meta device of others: `owners` are the ranks of all tensors,
    equal for those of a parameter. Tied embeddings come once.
    """
    num_yielded, mesh = 0, model._mesh
    for name, parameter, place, layer in (changing_parameters if is_partial else base_parameters)(model):
        owner = owners[num_yielded] if owners else 0
        whole = gathered(parameter, dtype if layer is None else parameter.dtype, mesh, owner, place)
        if layer is not None:
            a, b = (gathered(one[ADAPTER].weight, torch.float32, mesh, owner) for one in (layer.lora_A, layer.lora_B))
            whole = torch.addmm(whole.float(), b, a, alpha=layer.scaling[ADAPTER]).to(dtype)
        tensors = as_in_checkpoint(model, {name: whole})
        num_yielded += len(tensors)
        yield from tensors.items()


def checkpoint_shapes(model: PreTrainedModel, *, is_partial: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters as in a checkpoint, in the order of `iter_full_params`."""
    return {name: shape for shapes in shapes_by_parameter(model, is_partial).values() for name, shape in shapes.items()}


def shapes_by_parameter(model: PreTrainedModel, is_partial: bool = False) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each parameter, the shapes of its tensors in a checkpoint."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter, _, _ in (changing_parameters if is_partial else base_parameters)(model):
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


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability to 0, also those that a module passes to a function."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)


_SMALL, _LARGE = 2.0**-20, 1e30  # a soft cap keeps the first and maps the second to the cap


def return_hidden_states(model: PreTrainedModel, *, with_routers: bool = False) -> None:
    """Make the model return hidden states `[1, N, H]` instead of logits; call it before sharding.

    With `with_routers` it returns a pair, of these and the logits of each layer's router `[N, experts]`.

    Parameters outside of the layers, such as the output layer's weight, stay gathered until the backward pass is over.
    """
    if sees_images(model.config):
        model.forward = functools.partial(decoder_states, model)
        return
    forward = _states_and_routers if with_routers else _hidden_states
    model.forward = functools.partial(forward, decoder_of(model))


def _hidden_states(decoder: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    return decoder(**inputs).last_hidden_state


def _states_and_routers(decoder: torch.nn.Module, **inputs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    outputs = decoder(**inputs, output_router_logits=True)
    return outputs.last_hidden_state, outputs.router_logits


def logits_of(
    model: PreTrainedModel, context: dist.ProcessGroup | None = None, tensor: DeviceMesh | None = None
) -> Callable[[torch.Tensor, int], LazyLogits]:
    """Return the function from this rank's hidden states `[n, H]` of N tokens, and N, to logits.

    Call it before `return_hidden_states`. The groups are those of c and t.
    """
    scale, softcap = _probe(model)
    layer = model.get_output_embeddings()

    def logits(hidden_NH: torch.Tensor, num_tokens: int) -> LazyLogits:
        weight, bias, split = layer.weight, layer.bias, None
        if context is not None:
            split = Split(num_tokens, context)
        if isinstance(weight, DTensor):  # by t, once FSDP has gathered it
            assert tensor is not None
            first = tensor.get_local_rank() * -(-weight.shape[0] // tensor.size())
            split = Split(num_tokens, context, tensor.get_group(), first, weight.shape[0])
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        return LazyLogits(hidden_NH, weight, bias, scale, softcap, split)

    return logits


def values_of(
    model: PreTrainedModel, context: dist.ProcessGroup | None = None
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return the function from this rank's hidden states `[n, H]` of N tokens, and N, to float32 values `[N]`."""
    layer = model.get_submodule("score")

    def values(hidden_NH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        values_N = (hidden_NH.float() @ layer.weight.float().T).squeeze(-1)
        if context is None or not num_tokens:
            return values_N
        return rows_of_all(values_N, context, len(values_N), num_tokens)

    return values


def _probe(model: PreTrainedModel) -> tuple[float, float | None]:
    """Measure scale and soft cap of the logits; every model has different names for them."""
    layer, decoder = model.get_output_embeddings(), model.get_decoder()
    hidden = torch.linspace(-1.0, 1.0, layer.in_features)[None, None]
    raw = torch.linspace(-100.0, 100.0, layer.out_features)[None, None].clone()
    raw[..., 0], raw[..., -1] = _SMALL, _LARGE
    seen: list[torch.Tensor] = []

    def read_probe(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return raw.clone()

    decoder.forward, layer.forward = lambda *_, **__: _Outputs(last_hidden_state=hidden), read_probe
    try:
        with torch.no_grad():
            logits = model(inputs_embeds=hidden, use_cache=False).logits
    finally:
        del decoder.forward, layer.forward
    scale, largest = logits[..., 0].item() / _SMALL, logits[..., -1].item()
    softcap = largest if largest < scale * _LARGE / 2 else None
    expected = scale * raw if softcap is None else softcap * torch.tanh(scale * raw / softcap)
    if not torch.equal(seen[0], hidden) or logits.shape != raw.shape or not torch.allclose(logits, expected, rtol=1e-5):
        raise ValueError(
            "logits of a trained model must be those of its output layer, scaled and soft-capped at most: got "
            f"{type(model).__name__}, which changes them in another way. Use another model."
        )
    return scale, softcap


class _Outputs(BaseModelOutput):
    """Outputs of any decoder with only hidden states; some models unpack them as a mapping."""

    def __getattr__(self, name: str) -> None:
        return None

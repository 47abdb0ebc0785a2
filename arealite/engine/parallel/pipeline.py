"""Pipeline parallelism: a rank has some layers of a model, and torch's schedule moves hidden states between stages.

The first stage has the embeddings, the last one the final norm and the output layer. Layers of other stages are
placeholders, so names keep the numbering of the whole model and the model's own code runs the rest.
"""

# M micro-batches, N packed tokens of each, H hidden size

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.errors import ConfigError
from arealite.engine.parallel.mesh import Mesh
from arealite.utils import heartbeat
from arealite.utils.images import sees_images


class Elsewhere(NamedTuple):
    """A parameter or buffer of another stage."""

    stage: int
    tensor: torch.Tensor  # on the meta device


class _Passed(torch.nn.Identity):
    """What another stage has, in its place."""

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
        return states


def check_stages(model: PreTrainedModel, sizes: ParallelSizes) -> None:
    """Refuse a model that can't be cut into stages."""
    if sizes.pipeline == 1:
        return
    config, name = model.config.get_text_config(), type(model).__name__
    if sees_images(model.config):
        rule = "be 1 for a model that sees images"
    elif config.tie_word_embeddings and model.get_output_embeddings() is not None:
        rule = "be 1 for a model whose embeddings are its output layer"
    elif config.num_hidden_layers < sizes.pipeline:
        rule = f"be at most the number of layers, {config.num_hidden_layers}"
    elif not _passes_states(model):
        rule = "be 1 for a model whose decoder does more than run its layers"
    else:
        return
    raise ConfigError(f"p of allocation_mode must {rule}: got {sizes} and {name}. Write p1, and more t, c or d.")


def _passes_states(model: PreTrainedModel) -> bool:
    """Tell whether a decoder returns its input if its layers and its norm do; some scale it, at each stage again."""
    decoder = decoder_of(model)
    children, states = dict(decoder.named_children()), torch.linspace(-1.0, 1.0, 8).view(1, 2, 4)
    if not {"layers", "norm"} <= children.keys():
        return False
    try:
        for name, child in children.items():
            passed = torch.nn.ModuleList(_in_place_of(layer) for layer in child) if name == "layers" else _Passed()
            setattr(decoder, name, passed)
        found = decoder(inputs_embeds=states, position_ids=torch.arange(2)[None], use_cache=False).last_hidden_state
        return bool(torch.equal(found, states))
    except Exception:  # it needs more than hidden states
        return False
    finally:
        for name, child in children.items():
            setattr(decoder, name, child)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return what runs the layers of a language model or classifier."""
    return model.base_model if model.get_output_embeddings() is None else model.get_decoder()


def _in_place_of(layer: torch.nn.Module) -> torch.nn.Module:
    passed = _Passed()
    if hasattr(layer, "attention_type"):  # the decoder picks a mask by it
        passed.attention_type = layer.attention_type
    return passed


def cut(model: PreTrainedModel, mesh: Mesh) -> dict[str, Elsewhere | None]:
    """Keep this rank's stage of a model on the meta device.

    Return all names of parameters and buffers in the order of the whole model, with those that are elsewhere.
    """
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    num_stages, stage = mesh.sizes.pipeline, mesh.stage
    if num_stages == 1:
        return dict.fromkeys(whole)
    assert not any(".lora_" in name for name in whole), "configs refuse p with adapters"
    decoder, output = decoder_of(model), model.get_output_embeddings() or model.get_submodule("score")
    num_layers = len(decoder.layers)
    place_of = {decoder.get_input_embeddings(): 0, decoder.norm: num_stages - 1, output: num_stages - 1}
    place_of |= {layer: index * num_stages // num_layers for index, layer in enumerate(decoder.layers)}
    found: dict[str, Elsewhere | None] = dict.fromkeys(whole)
    for name, module in list(model.named_modules()):
        place = place_of.get(module, stage)
        if place == stage:
            continue
        prefix = f"{name}."
        found |= {one: Elsewhere(place, tensor) for one, tensor in whole.items() if one.startswith(prefix)}
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _in_place_of(module))
    return found


class Pipeline:
    """Runs micro-batches through the stages. Every method is collective over the stages of a block."""

    def __init__(self, model: PreTrainedModel, mesh: Mesh, dtype: torch.dtype) -> None:
        self._model, self._mesh, self._dtype = model, mesh, dtype
        self._hidden_size = model.config.get_text_config().hidden_size

    def run(
        self,
        inputs: Sequence[Mapping[str, Any]],
        finish: Callable[[int, torch.Tensor], torch.Tensor],
        scale: float,
    ) -> list[torch.Tensor]:
        """Run micro-batches of equal length, and return what `finish(index, hidden states)` returns on the last stage.

        Where gradients are enabled, run the backward pass of it times `scale`.
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # it takes half a second

        num_stages = self._mesh.sizes.pipeline
        is_first, is_last = self._mesh.stage == 0, self._mesh.stage == num_stages - 1
        num_tokens, has_grad = inputs[0]["input_ids"].shape[-1], torch.is_grad_enabled()
        states = torch.empty(1, num_tokens, self._hidden_size, dtype=self._dtype, device="meta", requires_grad=has_grad)
        ids = torch.empty(1, num_tokens, dtype=torch.long, device="meta")
        sent_as = None if is_last else self._dtype  # losses may need more (cast_lm_head_to_fp32)
        own = iter(inputs)  # a schedule runs micro-batches in their order
        self._model.forward = functools.partial(_states, decoder_of(self._model), is_first, sent_as, own)
        stage = PipelineStage(
            *(self._model, self._mesh.stage, num_stages, self._mesh.device),
            input_args=ids if is_first else states,
            output_args=states,
            group=self._mesh.stages,
        )
        results: list[torch.Tensor] = []

        def loss_fn(output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            result = finish(int(index), output[0])
            results.append(result.detach())
            return result * scale

        schedule = Schedule1F1B(stage, len(inputs), loss_fn, scale_grads=False)
        places = torch.arange(len(inputs))
        run: Any = schedule.step if has_grad else schedule.eval
        first = (torch.cat([one["input_ids"] for one in inputs]),) if is_first else ()
        target = places if is_last else None
        run(*first, target=target, return_outputs=False)
        return self._mesh.from_last_stage([result.cpu() for result in results])


def _states(
    decoder: Any, is_first: bool, dtype: torch.dtype | None, inputs: Iterator[Mapping[str, Any]], states: torch.Tensor
) -> torch.Tensor:
    """Return the hidden states `[1, N, H]` of a stage, from token ids or from those of the stage before."""
    heartbeat.tick()
    own = {key: value for key, value in next(inputs).items() if key != "input_ids"}
    own["input_ids" if is_first else "inputs_embeds"] = states
    hidden: torch.Tensor = decoder(**own, use_cache=False).last_hidden_state
    return hidden if dtype is None else hidden.to(dtype)

"""Arguments of loss functions: lazy logits from hidden states and the output layer, or the values of a classifier.

Logits must be `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`; other models are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from arealite.algorithms.logprobs import LazyLogits
from arealite.engine.vision import decoder_states
from arealite.utils.images import sees_images

_SMALL, _LARGE = 2.0**-20, 1e30  # a soft cap keeps the first and maps the second to the cap


def return_hidden_states(model: PreTrainedModel) -> None:
    """Make the model return hidden states `[1, N, H]` instead of logits; call it before sharding.

    Parameters outside of the layers, such as the output layer's weight, stay gathered until the backward pass is over.
    """
    if sees_images(model.config):
        model.forward = functools.partial(decoder_states, model)
        return
    is_lm = model.get_output_embeddings() is not None
    model.forward = functools.partial(_hidden_states, model.get_decoder() if is_lm else model.base_model)


def _hidden_states(decoder: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    return decoder(**inputs).last_hidden_state


def logits_of(model: PreTrainedModel) -> Callable[[torch.Tensor], LazyLogits]:
    """Return the function from hidden states `[N, H]` to logits; call it before `return_hidden_states`."""
    scale, softcap = _probe(model)
    layer = model.get_output_embeddings()
    return lambda hidden_NH: LazyLogits(hidden_NH, layer.weight, layer.bias, scale, softcap)


def values_of(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states `[N, H]` to float32 values `[N]`."""
    layer = model.get_submodule("score")
    return lambda hidden_NH: (hidden_NH.float() @ layer.weight.float().T).squeeze(-1)


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

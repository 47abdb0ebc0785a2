"""What models do to logits after the output layer is done here as well; test_models.py has those that do nothing."""

from __future__ import annotations

import pytest
import torch
from test_models import config_of
from tiny_models import build, config
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from arealite.engine.hf_model import logits_of, return_hidden_states

AFTER_THE_OUTPUT_LAYER: dict[str, tuple[str, dict[str, object]]] = {
    "Granite, divided": ("Granite", {"logits_scaling": 8.0}),
    "Cohere, multiplied": ("Cohere", {"logit_scale": 0.3}),
    "HyperCLOVAX, multiplied by logits_scaling": ("HyperCLOVAX", {"logits_scaling": 0.3}),
    "Gemma3, soft-capped": ("Gemma3", {"final_logit_softcapping": 2.0}),
    "Phi, with a bias": ("Phi", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", AFTER_THE_OUTPUT_LAYER)
def test_logits_are_those_of_transformers(name: str) -> None:
    family, changes = AFTER_THE_OUTPUT_LAYER[name]
    model = build(config_of(family, **changes), seed=1)
    input_ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        if (bias := model.get_output_embeddings().bias) is not None:
            bias.normal_()
        expected = model(input_ids=input_ids, use_cache=False).logits[0]
        assert expected.std() > 0.1
        make_logits = logits_of(model)
        return_hidden_states(model)
        logits = make_logits(model(input_ids=input_ids, use_cache=False)[0], input_ids.shape[1])
    torch.testing.assert_close(logits.dense(), expected, atol=1e-5, rtol=1e-5)
    assert (logits.bias_V is not None) == ("bias" in name)
    assert (logits.scale != 1 or logits.softcap is not None) == ("Phi" not in name)


def test_a_model_on_the_meta_device_is_probed_too() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config())
    logits = logits_of(model)(torch.zeros(2, 32, device="meta"), 2)
    assert (logits.scale, logits.softcap, logits.weight_VH.shape) == (1.0, None, (48, 32))


class Rectified(Qwen3ForCausalLM):
    def forward(self, **inputs: object) -> object:
        output = super().forward(**inputs)
        output.logits = output.logits.relu()
        return output


class Sliced(Qwen3ForCausalLM):
    def forward(self, **inputs: object) -> object:
        output = super().forward(**inputs)
        output.logits = output.logits[..., :-1]
        return output


class ScaledBefore(Qwen3ForCausalLM):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,))


@pytest.mark.parametrize("kind", [Rectified, Sliced, ScaledBefore])
def test_logits_that_are_changed_in_another_way_are_refused(kind: type[PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match=f"scaled and soft-capped at most: got {kind.__name__}, which changes them"):
        logits_of(kind(config()))

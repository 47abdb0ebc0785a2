"""The load-balancing loss of experts, against that of transformers, which is equal for one layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import token_batch, train_config
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.errors import ConfigError
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model
from arealite.engine.load_balancing import check_balanced
from arealite.engine.sft.lm_engine import sft_loss_fn

COEFFICIENT = 0.3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=16, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=6, intermediate_size=16),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_gradient_are_those_of_transformers(start: Callable[..., Any], tmp_path: Path, family: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[family])
    model.save_pretrained(tmp_path)
    columns = token_batch([9, 4, 12, 3, 7], 0)
    mask = columns["attention_mask"]
    outputs = model(columns["input_ids"], mask, output_router_logits=True)
    outputs.aux_loss.backward()
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert any("gate" in name for name in expected) and outputs.aux_loss > 2

    changes = {"gradient_checkpointing": True, "max_tokens": None}
    gradients, results = [], []
    for coefficient in (0.0, COEFFICIENT):
        engine = start(FSDPEngine(train_config(str(tmp_path), router_aux_loss_coef=coefficient, **changes)))
        results.append(engine.train_batch(columns, sft_loss_fn, count_loss_tokens))
        state = engine.optimizer.state
        found = {name: state[one]["exp_avg"].full_tensor() for name, one in engine.model.named_parameters()}
        gradients.append({name: moment / (1 - engine.config.optimizer.beta1) for name, moment in found.items()})
    assert results[1].pop("router_aux_loss") == pytest.approx(outputs.aux_loss.item(), rel=1e-6)
    assert results[0]["loss"] == results[1]["loss"]
    for name, gradient in expected.items():
        own = (gradients[1][name] - gradients[0][name]) / COEFFICIENT
        torch.testing.assert_close(own, gradient, atol=1e-6, rtol=1e-5)


def test_a_model_without_such_a_loss_is_refused(lm_path: str) -> None:
    config = train_config(lm_path, router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match="router_aux_loss_coef must be 0 for this model: got Qwen3ForCausalLM"):
        check_balanced(build_meta_model(lm_path, "packed_sdpa"), config)
    with pytest.raises(ConfigError, match="got p2, whose stages have some routers each"):
        check_balanced(build_meta_model(lm_path, "packed_sdpa"), config.model_copy(update={"parallel": "p2"}))

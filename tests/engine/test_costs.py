"""Costs of updates by hand, and against what torch counts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_cases import VOCABULARY, token_batch, train_config, write_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen3MoeConfig

from arealite.algorithms.logprobs import trained_tokens
from arealite.api.cli_args import LoRAConfig, TrainEngineConfig
from arealite.engine.lora import add_adapters
from arealite.engine.metrics import UpdateCosts, flops_per_token, peak_flops
from arealite.engine.sft.lm_engine import FSDPLMEngine

LENGTHS = [9, 40, 30]
HIDDEN, LAYERS, WIDTH, FEED_FORWARD = 32, 2, 2 * 16, 48
PRODUCTS = LAYERS * (HIDDEN * (2 * WIDTH + 2 * 16) + 3 * HIDDEN * FEED_FORWARD) + VOCABULARY * HIDDEN
"""Parameters of the tiny model in matrix products: q and o, k and v, gate, up and down, and the output layer."""


def meta(config: object) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_an_update_has_the_flops_that_torch_counts(start: Callable[..., Any], tmp_path: Path, tie: bool) -> None:
    engine = start(FSDPLMEngine(train_config(write_model(tmp_path, tie=tie), max_tokens=50)))
    assert "perf/mfu" not in engine.train_lm(token_batch(LENGTHS)), "the peak of this device is not known"
    engine.costs.peak = 1e9
    began = time.monotonic()
    with FlopCounterMode(display=False) as counter:
        metrics = engine.train_lm(batch := token_batch(LENGTHS))
    most_s = time.monotonic() - began
    num_trained = int(trained_tokens(batch["attention_mask"], batch["loss_mask"]).sum())
    # Logits are computed for the trained tokens alone, but again in the backward pass.
    logits = (8 * num_trained - 6 * sum(LENGTHS)) * VOCABULARY * HIDDEN
    attention = 12 * WIDTH * LAYERS * sum(length**2 for length in LENGTHS)  # torch does not count that of a CPU
    angles = 16 * sum(LENGTHS)  # of rotary embeddings, which older transformers make by a matrix product
    assert counter.get_total_flops() - logits - 6 * PRODUCTS * sum(LENGTHS) in (0, angles)
    flops = 6 * PRODUCTS * sum(LENGTHS) + attention
    assert metrics["perf/model_tflops"] == pytest.approx(flops / 1e12, rel=1e-9)
    assert flops / 1e9 / most_s < metrics["perf/mfu"] < 20 * flops / 1e9 / most_s
    assert metrics["perf/padding_share"] == metrics["perf/idle_share"] == metrics["perf/idle_share_max"] == 0
    assert 0.1 < metrics["perf/memory_gib_max"] < 8
    size = sum(parameter.numel() for parameter in engine.engine.model.parameters()) * 4 / 2**30
    assert metrics["perf/memory_gib_weights"] == pytest.approx(size)
    assert metrics["perf/memory_gib_moments"] == pytest.approx(2 * size, rel=1e-3)
    assert engine.costs.take()["perf/model_tflops"] == 0, "each update for itself"


def test_out_of_memory_names_what_needs_most_and_the_keys_for_it(start: Callable[..., Any], tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    engine = start(FSDPLMEngine(train_config(write_model(tmp_path, tie=True), max_tokens=50)))
    engine.engine.model.get_decoder().layers[0].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="got out of memory with one of 50 tokens, where activations need") as error:
        engine.train_lm(token_batch([50, 20]))
    assert "Set model.gradient_checkpointing=true, lower model.mb_spec.max_tokens_per_mb" in str(error.value)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H20", None),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_peaks_are_known_by_name_and_never_guessed(name: str, peak: float | None) -> None:
    assert peak_flops(name, torch.bfloat16) == peak
    assert peak_flops(name, torch.float32) is None


def test_layers_with_a_window_attend_to_less() -> None:
    config = Gemma3TextConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    costs = UpdateCosts(meta(config), torch.device("cpu"), torch.bfloat16)
    pairs = (10 * 8 + 10 * 10) + (4 * 4 + 4 * 4)
    assert costs.flops([10, 4]) == costs.flops_per_token * 14 + 12 * 32 * pairs


def test_experts_that_are_not_asked_do_not_count() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"num_key_value_heads": 1, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    attention, router, expert = 32 * (2 * 32 + 2 * 16), 8 * 32, 3 * 32 * 24
    assert flops_per_token(meta(Qwen3MoeConfig(**sizes))) == 6 * (attention + router + 2 * expert + 50 * 32)


def test_frozen_weights_need_no_gradient(lm_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(lm_path)
    add_adapters(model, TrainEngineConfig(path=lm_path, lora=LoRAConfig(rank=3)))
    adapters = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert flops_per_token(model) == 4 * PRODUCTS + 6 * adapters

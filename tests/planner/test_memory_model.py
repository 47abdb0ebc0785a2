"""The arithmetic against tensors of real models."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from arealite.algorithms import logprobs
from arealite.api.alloc_mode import ParallelSizes
from arealite.engine.packed_attention import PACKED_SDPA, OnCPU
from arealite.generation.model_runner import ModelRunner
from arealite.planner.memory import (
    LOGITS_BLOCK,
    MIN_COLUMNS,
    kv_bytes_per_token,
    layer_activations,
    model_shape,
    phases,
    shape_of_rank,
    training_state,
    training_step,
)

torch.set_num_threads(1)
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def build(
    config_type=Qwen3Config, *, dtype=torch.float32, layers=2, kv_heads=2, tied=True, attention=PACKED_SDPA, **changes
):
    config = config_type(
        **SIZES, num_hidden_layers=layers, num_key_value_heads=kv_heads, tie_word_embeddings=tied, **changes
    )
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_counts_every_parameter_once(tied: bool) -> None:
    model = build(layers=3, tied=tied)
    shape = model_shape(model)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters * 3 + shape.outer_parameters == shape.num_parameters
    assert shape.outer_parameters == (1 if tied else 2) * 300 * 64 + 64
    assert (shape.is_tied, shape.vocab, shape.has_qk_norm) == (tied, 300, True)
    with torch.device("meta"):
        assert model_shape(build(layers=3, tied=tied)) == shape


def test_parameters_gradients_and_moments_of_a_model_that_was_trained() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], cu_seqlens=OnCPU(torch.tensor([0, 8]))).logits.sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert training_state(model_shape(model), ranks=1, has_optimizer=True) == {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(parameter.grad for parameter in parameters),
        "AdamW moments": bytes_of(moments),
    }
    reference = training_state(model_shape(model), ranks=2, has_optimizer=False)
    assert reference == {"parameters": bytes_of(parameters) // 2}


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    model = build()
    whole = model_shape(model)
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    trained, shape = model.lm_head.weight.numel(), model_shape(model)
    assert shape == dataclasses.replace(whole, num_frozen=whole.num_parameters - trained)
    assert training_state(shape, ranks=1, has_optimizer=True, compute_bytes=2) == {
        "parameters": 4 * trained + 2 * shape.num_frozen,
        "gradients": 4 * trained,
        "AdamW moments": 8 * trained,
    }
    settings = {"tokens": 100, "ranks": 1, "compute_bytes": 2, "accumulates": True, "recomputes": False}
    step, of_all = training_step(shape, **settings), training_step(whole, **settings)
    assert (step["whole gradients"], of_all["whole gradients"]) == (4 * trained, 4 * whole.num_parameters)
    block, hidden = 2 * 100 * 300 * 4, 100 * 64 * 6
    assert step["output layer"] == block + hidden, "no gradient of its weight"
    assert "gradients to send" not in step or step["gradients to send"] == 0


def kept_by_autograd(model, num_tokens: int) -> int:
    """Count the bytes that the forward pass keeps for the backward pass, without parameters."""
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(
            input_ids=torch.arange(num_tokens)[None],
            position_ids=torch.arange(num_tokens)[None],
            use_cache=False,
            cu_seqlens=OnCPU(torch.tensor([0, num_tokens])),
        ).last_hidden_state
    assert hidden.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("config_type", [Qwen3Config, Qwen2Config, LlamaConfig])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_activations_are_what_autograd_keeps_of_a_layer(config_type, dtype, kv_heads) -> None:
    two, five = (build(config_type, dtype=dtype, layers=layers, kv_heads=kv_heads) for layers in (2, 5))
    of_a_layer = (kept_by_autograd(five, 100) - kept_by_autograd(two, 100)) / 3 / 100
    assert layer_activations(model_shape(two), compute_bytes=dtype.itemsize) == of_a_layer


def test_keys_and_values_are_those_of_the_embedded_server() -> None:
    model = build(layers=3, attention="sdpa")
    cache = ModelRunner(model, slots=2, context=32).cache.kv
    shape = model_shape(model)
    assert kv_bytes_per_token(shape, value_bytes=4) * (2 + 1) * 32 == bytes_of([cache])
    assert kv_bytes_per_token(shape, value_bytes=2, gpus=2) * 4 == kv_bytes_per_token(shape, value_bytes=4)
    assert kv_bytes_per_token(shape, value_bytes=4, gpus=8) * 2 == kv_bytes_per_token(shape, value_bytes=4), "1 head"


def test_a_step_worked_by_hand() -> None:
    shape = model_shape(build(layers=2))
    layer, one, outer = layer_activations(shape, compute_bytes=2), shape.layer_parameters, shape.outer_parameters
    settings = {"ranks": 4, "compute_bytes": 2}
    wide = dataclasses.replace(shape, vocab=30_000)
    step = training_step(wide, tokens=100, accumulates=True, recomputes=False, **settings)
    assert step == {
        "gathered weights": outer * 2,
        "activations": 100 * 2 * layer,
        "output layer": 2 * 100 * 30_000 * 4 + (30_000 + 100) * 64 * 2 + 100 * 64 * 4,
        "whole gradients": shape.num_parameters * 4,
    }
    long = {"tokens": 2000, "accumulates": False, "recomputes": True}
    step = training_step(wide, **long, **settings)
    assert step["activations"] == 2000 * 2 * 64 * 2, "what runs again is not there while the output layer runs"
    step = training_step(dataclasses.replace(shape, vocab=1), **long, **settings)
    assert step == {
        "gathered weights": (outer + 2 * one) * 2,
        "activations": 2000 * (2 * 64 * 2 + layer),
        "output layer": 64 * 2,
        "gradients to send": one * (2 + 4 + 1),
        "whole gradients": 0,
    }
    large = dataclasses.replace(shape, outer_parameters=10**7)
    step = training_step(large, tokens=1, accumulates=False, recomputes=True, **settings)
    assert step == {"gradients to send": (4 + 2) * 10**7, "whole gradients": 0}
    step = training_step(large, tokens=1, accumulates=False, recomputes=True, is_gloo=True, **settings)
    assert step["gradients to send"] == (4 + 1 + 4) * 10**7 + 300 * 64 * 2


def test_options_of_memory_worked_by_hand() -> None:
    shape = dataclasses.replace(model_shape(build(layers=4)), vocab=30_000)
    sizes = {"tokens": 100, "ranks": 4, "compute_bytes": 2, "recomputes": True}
    plain, offloaded = (phases(shape, **sizes, offloads=offloads) for offloads in (False, True))
    for phase in ("output layer", "layer"):
        assert plain[phase]["activations"] - offloaded[phase]["activations"] == 3 * 100 * 64 * 2
    exact = phases(shape, **sizes, outer_bytes=4)
    block, hidden = 2 * 100 * 30_000 * 4, 30_000 * 64 * 4 + 100 * 64 * 8
    assert exact["output layer"]["output layer"] == block + hidden
    layer = exact["layer"]["gathered weights"]
    assert layer == shape.outer_parameters * 4 + 2 * shape.layer_parameters * 2, "layers stay in the compute dtype"
    assert exact["end"]["gradients to send"] == shape.outer_parameters * 4 + max(
        shape.outer_parameters * 4, 30_000 * 64 * 4 + shape.outer_parameters
    )
    state = training_state(shape, ranks=1, has_optimizer=True, moment_bytes=2)
    assert state["AdamW moments"] == state["gradients"] == 4 * shape.num_parameters


def test_what_a_rank_has_of_a_model() -> None:
    """1000 parameters: 2 layers of 300, of them 240 of experts, and 400 in no layer."""
    shape = dataclasses.replace(
        model_shape(build()),
        num_parameters=1000,
        layer_parameters=300,
        outer_parameters=400,
        is_tied=False,
        expert_parameters=480,
        layer_experts=240,
    )

    def of(text: str, copies: int = 1) -> tuple[int, int, int]:
        found = shape_of_rank(shape, ParallelSizes.from_str(text), copies=copies)
        return found.num_parameters, found.layer_parameters, found.outer_parameters

    assert of("d4") == of("c4") == (1000, 300, 400), "the rest is FSDP's"
    assert of("t2") == (500, 150, 200)
    assert of("d4e4") == (1000, 60 + 60, 400), "a rank gathers a quarter of the experts"
    assert of("d2t2e4") == (500, 30 + 60, 200)
    assert of("d4e4", copies=2) == (520 + 240, 120, 400), "experts have no copies"
    assert of("p2") == (300 + 200, 300, 200), "the embeddings are on one stage, the output layer on the other"
    divided = shape_of_rank(shape, ParallelSizes.from_str("t2"))
    assert (divided.num_heads, divided.num_kv_heads, divided.mlp, divided.vocab) == (2, 1, 96, 150)
    assert (divided.hidden, divided.num_layers) == (shape.hidden, shape.num_layers), "inputs of layers are whole"


def test_logits_are_there_in_blocks() -> None:
    assert (LOGITS_BLOCK, MIN_COLUMNS) == (logprobs.BLOCK_VALUES, logprobs.MIN_COLUMNS)
    shape = dataclasses.replace(model_shape(build()), vocab=151_936)
    for tokens, columns in ((100, 151_936), (8192, 4096), (100_000, 1024)):
        step = training_step(shape, tokens=tokens, ranks=64, compute_bytes=2, accumulates=False, recomputes=False)
        gradients = 151_936 * 64 * 2 + tokens * 64 * 6
        assert step["output layer"] == 2 * tokens * columns * 4 + gradients


def test_experts_that_a_token_does_not_use_keep_nothing() -> None:
    with torch.device("meta"):
        model = build(Qwen3MoeConfig, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    shape = model_shape(model)
    assert shape.mlp == 2 * 96
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.device("meta"):
        assert model_shape(build(MixtralConfig, num_local_experts=8, num_experts_per_tok=2)).mlp == 2 * 192

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, build, config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from arealite.engine.hf_model import load_whole_model
from arealite.generation.model_runner import ModelRunner, read_checkpoint
from arealite.utils.hf import load_causal_lm

PROMPTS = [[5, 9, 7, 3, 11], [8], [20, 21, 22, 23, 24, 25, 26, 27, 28], [5, 9, 7, 3, 12]]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 16,
}
CONTINUATION = [13, 4, 31, 30, 2, 40]


@pytest.mark.parametrize("config_type", [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig, Qwen3MoeConfig])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prefill_and_decode_equal_the_models_own_forward(
    config_type: type[PreTrainedConfig], deterministic: bool
) -> None:
    model = build(config(config_type, sliding_window=None), seed=1)
    expected = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            logits = model(torch.tensor([prompt + CONTINUATION])).logits[0].log_softmax(-1)
            expected.append(logits[len(prompt) - 1 :])
        runner = ModelRunner(model, slots=4, context=64, deterministic=deterministic)
        got = [runner.prefill(PROMPTS, range(4))]
        for i, token in enumerate(CONTINUATION):
            positions = np.array([len(prompt) + i for prompt in PROMPTS])
            got.append(runner.decode([token] * 4, positions))
    assert torch.allclose(torch.stack(got, 1).log_softmax(-1), torch.stack(expected), atol=1e-5)
    assert torch.stack(expected).std() > 0.5  # the comparison is not between constants


def test_one_sequence_per_forward_makes_the_bits_independent_of_neighbours() -> None:
    runner = ModelRunner(build(config(), seed=1), slots=4, context=64, deterministic=True)
    with torch.inference_mode():
        together = [runner.prefill(PROMPTS, range(4))[2], runner.decode([3] * 4, np.array([5, 1, 9, 5]))[2]]
        alone = [runner.prefill(PROMPTS[2:3], [0])[0], runner.decode([3], np.array([9]))[0]]
    assert all(torch.equal(a, b) for a, b in zip(together, alone))


@pytest.mark.parametrize(
    ("model_config", "reason"),
    [
        (lambda: config(MistralConfig, sliding_window=16), "sliding_window must be at least the context: got 16 and"),
        (lambda: config(Gemma2Config, sliding_window=64), "softcap"),
        (lambda: MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2), "Mamba"),
        (lambda: config(LlamaConfig, rope_parameters=DYNAMIC), "got rope_type dynamic"),
        (lambda: config(Phi3Config, rope_parameters=LONGROPE), "got rope_type longrope"),
    ],
)
def test_a_model_that_would_be_served_wrongly_is_refused(
    model_config: Callable[[], PreTrainedConfig], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelRunner(build(model_config(), seed=0), slots=2, context=64)


def test_a_cache_beyond_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of 1000000000000 slots of 64 tokens must fit .* Unable to allocate"):
        ModelRunner(build(config(), seed=0), slots=10**12, context=64)


def test_absolute_positions_work_too() -> None:
    model = build(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64), seed=0)
    expected = model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
    with torch.inference_mode():
        runner = ModelRunner(model, slots=2, context=128)
        assert torch.allclose(runner.prefill([[1, 2, 3, 4]], [0])[0], expected, atol=1e-5)
    assert runner.cache.context == 64


def weights_of(seed: int, **changes: object) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in build(config(**changes), seed=seed).named_parameters()}


@pytest.fixture
def runner(reference: PreTrainedModel, model_path: str) -> ModelRunner:
    return ModelRunner(load_causal_lm(model_path, dtype=torch.float32), slots=2, context=64)


def without(name: str) -> dict[str, torch.Tensor]:
    weights = weights_of(5)
    del weights[name]
    return weights


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (without("model.norm.weight"), r"1 missing, \['model.norm.weight'\]"),
        ({**weights_of(5), "model.extra": torch.zeros(1)}, r"1 unknown, \['model.extra'\]"),
        (weights_of(5, intermediate_size=65), r"shape of .*mlp.* must be \[64, 32\]: got \[65, 32\]"),
        ({**weights_of(5), "lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}, "lm_head.weight must equal"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    runner: ModelRunner, weights: dict[str, torch.Tensor], reason: str
) -> None:
    with torch.inference_mode():
        before = runner.prefill([[4, 5, 6]], [0])
        with pytest.raises(ValueError, match=reason):
            runner.load_weights(weights)
        assert torch.equal(runner.prefill([[4, 5, 6]], [0]), before)


def test_weights_that_stay_cost_nothing(runner: ModelRunner) -> None:
    """A frozen embedding may be half of a model."""
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            sizes.append(output.numel())
            return output

    weights = weights_of(5)
    with torch.inference_mode(), Sizes():
        runner.load_weights({"model.norm.weight": weights["model.norm.weight"]}, is_partial=True)
    assert torch.equal(runner.model.model.norm.weight, weights["model.norm.weight"])
    assert max(sizes) == weights["model.norm.weight"].numel()


def test_a_tied_head_may_be_sent_along(runner: ModelRunner) -> None:
    weights = weights_of(5)
    with torch.inference_mode():
        runner.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})


def test_a_checkpoint_of_several_files_is_read_whole(tmp_path: Path) -> None:
    build(config(), seed=5).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = read_checkpoint(str(tmp_path))
    assert weights.keys() == weights_of(5).keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_of(5).items())


def test_weights_that_are_pickles_or_cut_off_are_refused(tmp_path: Path) -> None:
    """By servers and trainers: only safetensors files run no code."""
    model = build(config(), seed=5)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    refusal = rf"{tmp_path} must hold whole safetensors files: got .* Download it again"
    for load in (load_whole_model, lambda path: load_causal_lm(path, dtype=torch.float32)):
        with pytest.raises(ValueError, match=refusal):
            load(str(tmp_path))
    model.save_pretrained(tmp_path)
    (file := tmp_path / "model.safetensors").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=refusal):
        load_whole_model(str(tmp_path))

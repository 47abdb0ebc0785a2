"""One GPU does what a CPU does: gradients, updates, fingerprints, checkpoints."""

from __future__ import annotations

import functools
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
from training_cases import OPTIMIZER, actor_config, of_update, token_batch, train_config, write_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import is_flash_attn_2_available
from two_rank_program import ACTOR, BATCHES, TRAJECTORIES, full_params, ppo_steps, sft_steps

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import FSDPEngineConfig, OptimizerConfig
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.utils.fingerprint import fingerprint

pytestmark = pytest.mark.gpu
SPEC = FinetuneSpec(1, 100, 10)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


FLASH = pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs flash-attn")


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [
        ("packed_varlen", "bfloat16", 0.1),
        ("packed_sdpa", "float32", 1e-4),
        ("packed_sdpa", "bfloat16", 0.1),
        pytest.param("flash_attention_2", "bfloat16", 0.1, marks=FLASH),
    ],
)
def test_the_gradient_is_that_of_plain_transformers(
    model_path: str, attention: str, dtype: str, tolerance: float, offload: bool
) -> None:
    """The relative distance of the whole gradient, for packed micro-batches and recomputed activations."""
    batch = token_batch([9, 4, 12, 3, 7])
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    logits = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    (-logprobs[batch["loss_mask"][:, 1:].bool()].mean()).backward()

    fsdp = FSDPEngineConfig(offload_params=offload)
    config = train_config(
        model_path, max_tokens=20, dtype=dtype, attn_impl=attention, fsdp=fsdp, gradient_checkpointing=True
    )
    engine = FSDPEngine(config)
    engine.initialize(None, SPEC)
    engine.train()
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    squares = torch.zeros(2, dtype=torch.float64)
    for name, parameter in engine.model.named_parameters():
        expected = reference.get_parameter(name).grad
        found = engine.optimizer.state[parameter]["exp_avg"].to("cuda").full_tensor().cpu().double() / 0.1
        squares += torch.stack([(found - expected).square().sum(), expected.square().sum()])
    engine.destroy()
    distance = (squares[0] / squares[1]).sqrt().item()
    print(f"distance {distance:.2g}")
    assert distance < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fingerprint_does_not_depend_on_the_device(dtype: torch.dtype) -> None:
    tensor = torch.randn(600, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert fingerprint(tensor.cuda()) == fingerprint(tensor) != fingerprint((-tensor).cuda())


def train_both(_: Connection, model_path: str, out: Path) -> None:
    """Train by SFT and PPO on the first device that this process sees, and save the weights."""
    engine = FSDPEngine(train_config(model_path, max_tokens=15))
    engine.initialize(None, SPEC)
    found: dict[str, Any] = {"device": engine.device.type, "sft": sft_steps(engine, BATCHES)}
    found["fingerprint"] = engine.fingerprint()
    engine.save(SaveLoadMeta(str(out / "saved"), with_optim=True))
    engine.destroy()
    actor = FSDPPPOActor(actor_config(model_path, **ACTOR))
    actor.initialize(None, SPEC)
    found["ppo"] = ppo_steps(actor, TRAJECTORIES.clone())
    actor.destroy()
    torch.save(found, out / "found.pt")


@pytest.fixture(scope="module")
def runs(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds on a CPU and on a GPU."""
    found: dict[str, Any] = {}
    for name, visible in {"cpu": "", "cuda": "0"}.items():
        out = tmp_path_factory.mktemp(name)
        with testing_forks.connected(train_both, model_path, out, CUDA_VISIBLE_DEVICES=visible) as process:
            assert process.end() == 0
        found[name] = torch.load(out / "found.pt", weights_only=False, map_location="cpu") | {"out": out}
        assert found[name]["device"] == name
    return found


def test_fine_tuning_equals_that_on_a_cpu(runs: dict[str, Any]) -> None:
    assert runs["cuda"]["sft"]["losses"] == pytest.approx(runs["cpu"]["sft"]["losses"], abs=1e-4)
    for name, expected in runs["cpu"]["sft"]["params"].items():
        torch.testing.assert_close(runs["cuda"]["sft"]["params"][name], expected, atol=1e-3, rtol=0)


def test_policy_updates_equal_those_on_a_cpu(runs: dict[str, Any]) -> None:
    torch.testing.assert_close(
        runs["cuda"]["ppo"]["advantages"], runs["cpu"]["ppo"]["advantages"], atol=1e-4, rtol=1e-4
    )
    for metrics, expected in zip(runs["cuda"]["ppo"]["metrics"], runs["cpu"]["ppo"]["metrics"], strict=True):
        assert of_update(metrics) == pytest.approx(of_update(expected), abs=1e-3, rel=1e-3)


def test_a_checkpoint_of_a_gpu_is_read_exactly_and_has_its_fingerprint(runs: dict[str, Any]) -> None:
    saved = str(runs["cuda"]["out"] / "saved")
    engine = FSDPEngine(train_config(saved))
    engine.initialize(None, SPEC)
    engine.load(SaveLoadMeta(saved, with_optim=True))
    for name, parameter in full_params(engine).items():
        assert torch.equal(parameter.cpu(), runs["cuda"]["sft"]["params"][name])
    assert engine.fingerprint() == runs["cuda"]["fingerprint"]
    engine.destroy()


def test_a_recovery_checkpoint_has_the_random_numbers_of_the_gpu(model_path: str, tmp_path: Path) -> None:
    engine = FSDPEngine(train_config(model_path))
    engine.initialize(None, SPEC)
    engine.train()
    engine.train_batch(BATCHES[0], sft_loss_fn, count_loss_tokens)
    torch.rand(7, device=engine.device)
    engine.keep_rng()
    engine.keep_state()
    expected = torch.rand(7, device=engine.device)
    engine.write_state(str(tmp_path))
    assert not torch.equal(torch.rand(7, device=engine.device), expected)
    engine.read_state(str(tmp_path))
    assert torch.equal(torch.rand(7, device=engine.device), expected)
    engine.destroy()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded activations": {"activation_offloading": True},
    "float32 output layer": {"cast_lm_head_to_fp32": True},
    "bf16 moments": {"optimizer": OptimizerConfig(**OPTIMIZER | {"type": "adam_bf16"})},
    "compiled": {"torch_compile": True},
}


@pytest.fixture(scope="module")
def deep_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 12 layers."""
    config = Qwen3Config(vocab_size=64, hidden_size=256, num_hidden_layers=12, intermediate_size=256, head_dim=64)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    folder = str(tmp_path_factory.mktemp("deep"))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@functools.cache
def outcome(folder: str, option: str) -> dict[str, Any]:
    """Losses and peak bytes of three updates in bfloat16."""
    engine = FSDPEngine(train_config(folder, dtype="bfloat16", gradient_checkpointing=True, **OPTIONS[option]))
    engine.initialize(None, SPEC)
    engine.train()
    before, batch = torch.cuda.memory_allocated(), token_batch([2000, 1500, 500])
    torch.cuda.reset_peak_memory_stats()
    losses = [engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"] for _ in range(3)]
    found = {"losses": losses, "peak": torch.cuda.max_memory_allocated() - before}
    print(option, found)
    engine.destroy()
    return found


def test_offloaded_activations_free_memory(deep_path: str) -> None:
    inputs = 12 * 4000 * 256 * 2  # of the layers, one of which is there
    freed = outcome(deep_path, "plain")["peak"] - outcome(deep_path, "offloaded activations")["peak"]
    assert 0.5 * inputs < freed <= inputs


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "plain"])
def test_options_learn_the_same(deep_path: str, option: str) -> None:
    assert outcome(deep_path, option)["losses"] == pytest.approx(outcome(deep_path, "plain")["losses"], rel=0.02)

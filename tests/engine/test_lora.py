"""LoRA: what is trained, saved and served is what PEFT trains, saves and merges."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from peft import PeftModel
from tensordict import TensorDict
from training_cases import (
    SPEC,
    actor_config,
    gradient_norm,
    gradients,
    pair_batch,
    plain_logprobs,
    token_batch,
    train_config,
    trajectory_batch,
    write_model,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, Qwen3MoeConfig

from arealite.algorithms.logprobs import packed_logprobs
from arealite.api.cli_args import LoRAConfig, PPOActorConfig, RWEngineConfig, TrainEngineConfig
from arealite.api.errors import CheckpointError, ConfigError
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.rw.reward_model import RewardModel
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.hf import load_causal_lm

LORA = LoRAConfig(rank=4, alpha=12)
BATCH = token_batch([9, 4, 12, 3, 7, 11])
Make = Callable[..., FSDPLMEngine]


@pytest.fixture
def make(start: Callable[..., Any], lm_path: str) -> Make:
    def make_engine(path: str = lm_path, **changes: object) -> FSDPLMEngine:
        return start(FSDPLMEngine(train_config(path, **({"lora": LORA} | changes))))

    return make_engine


def params(engine: FSDPEngine, *, trained: bool | None = None) -> dict[str, torch.Tensor]:
    named = engine.model.named_parameters()
    return {name: p.full_tensor().detach().clone() for name, p in named if trained in (None, p.requires_grad)}


def trained_engine(make: Make, **changes: object) -> FSDPLMEngine:
    """Return an engine after three steps, which move B off 0."""
    engine = make(**changes)
    for _ in range(3):
        engine.train_lm(BATCH)
    return engine


def logprobs(engine: FSDPEngine, batch: TensorDict = BATCH) -> torch.Tensor:
    engine.eval()
    return engine.forward(
        batch.select("input_ids", "attention_mask"),
        lambda logits, mb: packed_logprobs(logits, mb["input_ids"], mb["cu_seqlens"]),
    )


def plain_weights(path: str) -> list[tuple[str, torch.Tensor]]:
    return list(AutoModelForCausalLM.from_pretrained(path).named_parameters())


def peft_model(path: str, adapter: str | Path, **options: object) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, **options).eval()


def peft_params(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return PEFT's parameters by our names."""
    return {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_gradient_is_that_of_peft_in_plain_torch(
    make: Make, lm_path: str, tmp_path: Path, gradient_checkpointing: bool
) -> None:
    trained_engine(make).save(SaveLoadMeta(str(tmp_path)))
    engine = make(gradient_checkpointing=gradient_checkpointing)
    engine.load(SaveLoadMeta(str(tmp_path)))
    result = engine.train_lm(BATCH)
    plain = peft_model(lm_path, tmp_path, is_trainable=True)
    mask = BATCH["loss_mask"].bool()
    loss = -plain_logprobs(plain, BATCH)[mask].mean()
    loss.backward()
    expected = {name: p.grad for name, p in peft_params(plain).items() if p.grad is not None}
    assert result["sft/loss"] == pytest.approx(loss.item(), abs=1e-5)
    found = gradients(engine)
    assert expected.keys() == found.keys() and len(expected) == 28
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert result["optim/grad_norm"] == pytest.approx(gradient_norm(plain), rel=1e-4)


def test_only_adapters_move_and_the_optimizer_knows_only_them(make: Make) -> None:
    engine = make()
    before = params(engine)
    assert all((p == 0).all() == ("lora_B" in name) for name, p in params(engine, trained=True).items())
    engine.train_lm(BATCH)
    engine.train_lm(BATCH)
    after, trained = params(engine), params(engine, trained=True)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained.keys()
    assert all("lora_" in name for name in trained) and len(trained) == 28
    held = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == sum(p.numel() for p in trained.values())


@pytest.mark.parametrize(("dtype", "tie"), [("float32", True), ("bfloat16", False)])
def test_a_saved_adapter_is_pefts_and_a_merged_model_is_the_same_policy(
    make: Make, tmp_path: Path, dtype: str, tie: bool
) -> None:
    path = write_model(tmp_path / "base", tie=tie)
    engine = trained_engine(make, path=path, dtype=dtype)
    ours = logprobs(engine)
    engine.save(SaveLoadMeta(str(tmp_path / "adapter")))
    engine.config.lora = LORA.new(merge_on_save=True)
    engine.save(SaveLoadMeta(str(tmp_path / "merged")))
    assert sorted(one.name for one in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with_adapter = peft_model(path, tmp_path / "adapter")
    of_peft = plain_logprobs(with_adapter, BATCH).detach()
    merged = load_causal_lm(str(tmp_path / "merged"))
    assert merged.dtype == getattr(torch, dtype)
    bound = 1e-5 if dtype == "float32" else 0.15
    torch.testing.assert_close(of_peft, ours, atol=bound, rtol=0)
    torch.testing.assert_close(plain_logprobs(merged, BATCH).detach(), ours, atol=bound, rtol=0)
    base = plain_logprobs(load_causal_lm(path, dtype=torch.float32), BATCH).detach()
    assert (base - ours).abs().max() > 1, "the adapter does something"
    # W + s B A, of W as it is computed with; rounded once.
    for name, p in peft_params(with_adapter).items():
        if name.endswith("base_layer.weight"):
            stem = name.removesuffix(".base_layer.weight")
            a, b = (peft_params(with_adapter)[f"{stem}.lora_{one}.default.weight"] for one in "AB")
            exact = p.to(getattr(torch, dtype)).double() + 12 / 4 * b.double() @ a.double()
            found = merged.get_parameter(f"{stem}.weight").double()
            error = 2.0**-8 if dtype == "bfloat16" else 2.0**-22
            assert ((found - exact).abs() <= error * exact.abs().clamp(min=0.05)).all()


def test_resumed_equals_uninterrupted(make: Make, tmp_path: Path) -> None:
    engine = trained_engine(make)
    engine.save(SaveLoadMeta(str(tmp_path), with_optim=True))
    assert not list(tmp_path.glob("model*")), "the base is not saved again"
    engine.train_lm(BATCH)
    again = make()
    again.load(SaveLoadMeta(str(tmp_path), with_optim=True))
    again.train_lm(BATCH)
    found, expected = params(again), params(engine)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert again.fingerprint() == engine.fingerprint()


def test_what_was_frozen_is_stored_in_the_compute_dtype(make: Make) -> None:
    engine = make(dtype="bfloat16")
    assert {(p.dtype, p.requires_grad) for p in engine.model.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }


def test_dropout_acts_in_training_unless_it_is_off(make: Make) -> None:
    lora = LORA.new(dropout=0.5)
    losses = [
        trained_engine(make, **one).evaluate_lm(BATCH)
        for one in ({}, {"lora": lora}, {"lora": lora, "disable_dropout": True})
    ]
    assert losses[0] == losses[2] != losses[1]


def test_some_layers_only(make: Make, lm_path: str, tmp_path: Path) -> None:
    for targets in (["q_proj", "v_proj"], r".*\.(q|v)_proj"):
        engine = trained_engine(make, lora=LoRAConfig(rank=2, target_modules=targets))
        names = {name.split(".")[4] for name in params(engine, trained=True)}
        assert names == {"q_proj", "v_proj"}
        assert engine.frozen_weights is not None
        assert all(("self_attn" in name) != (name in engine.frozen_weights.names) for name, _ in plain_weights(lm_path))
        engine.save(SaveLoadMeta(str(tmp_path / "a")))
        torch.testing.assert_close(
            plain_logprobs(peft_model(lm_path, tmp_path / "a"), BATCH), logprobs(engine), atol=1e-5, rtol=0
        )


def test_the_reference_is_the_policy_without_adapters(start: Callable[..., Any], lm_path: str, tmp_path: Path) -> None:
    """Also once the policy is trained, which the reference does not disturb."""

    def reference_of(path: str, **options: FSDPPPOActor) -> FSDPPPOActor:
        return start(FSDPPPOActor(PPOActorConfig(path=path, dtype="float32")), **options)

    config = actor_config(lm_path, lora=LORA, kl_ctl=0.1, group_size=2)
    actor, alone = start(FSDPPPOActor(config)), start(FSDPPPOActor(config))
    ref, whole = reference_of(lm_path, policy=actor), reference_of(lm_path)
    assert ref.model is actor.model and whole.model is not actor.model
    batch = trajectory_batch([9, 4, 12, 3], group_size=2)
    for _ in range(3):
        for one, reference in ((actor, ref), (alone, whole)):
            batch["ref_logprobs"] = reference.compute_logprobs(batch)
            batch["proximal_logprobs"] = one.compute_logprobs(batch)
            one.compute_advantages(batch)
            one.ppo_update(batch)
        assert torch.equal(ref.compute_logprobs(batch), whole.compute_logprobs(batch))
        assert (actor.compute_logprobs(batch) - ref.compute_logprobs(batch)).abs().max() > 0.01
    assert actor.fingerprint() == alone.fingerprint()
    other = reference_of(write_model(tmp_path / "other", seed=1), policy=actor)
    assert other.model is not actor.model, "it started elsewhere"


def test_a_reward_model_keeps_its_head_with_the_adapter(
    start: Callable[..., Any], lm_path: str, tmp_path: Path
) -> None:
    config = RWEngineConfig(**train_config(lm_path, lora=LORA).model_dump(exclude_unset=True))
    engine, again = start(FSDPRWEngine(config)), start(FSDPRWEngine(config))
    pairs = pair_batch(3)
    for _ in range(3):
        engine.train_rw(pairs)
    scores = engine.compute_scores(pairs)
    engine.save(SaveLoadMeta(str(tmp_path)))
    again.load(SaveLoadMeta(str(tmp_path)))
    assert torch.equal(again.compute_scores(pairs), scores) and scores.abs().max() > 0.1
    base = AutoModelForSequenceClassification.from_pretrained(lm_path, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = 0
    model = PeftModel.from_pretrained(base, tmp_path).eval()
    rows = zip(pairs["input_ids"], pairs["attention_mask"].sum(1).tolist())
    found = torch.cat([model(ids[None, :length]).logits[0] for ids, length in rows])
    torch.testing.assert_close(found.detach(), scores, atol=1e-5, rtol=0)


def refusal(config: TrainEngineConfig) -> str:
    with pytest.raises(ValueError) as caught:
        FSDPLMEngine(config).initialize(None, SPEC)
    return str(caught.value)


def test_layers_that_can_not_be_adapted_are_refused(lm_path: str, tmp_path: Path) -> None:
    for targets, told in (
        (["q_proj", "w_proj"], "got w_proj"),
        (["q_proj", "lm_head"], "got lm_head"),
        (["embed_tokens"], "got model.embed_tokens"),
        (["q_proj", "input_layernorm"], "Target module Qwen3RMSNorm"),
        (r".*\.w_proj", "Target modules"),
        ("*.q_proj", "nothing to repeat"),
    ):
        found = refusal(train_config(lm_path, lora=LoRAConfig(target_modules=targets)))
        assert found.startswith("lora.target_modules must match linear layers of Qwen3ForCausalLM"), found
        assert told in found and found.endswith("or to a list of ends of names, [q_proj, v_proj]."), found
    for kind, told in (
        (Qwen3MoeConfig, "must be matrices: got model.layers.0.mlp.experts."),
        (GPT2Config, "got transformer.h.0"),
    ):
        experts = (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind is Qwen3MoeConfig else {}
        )
        folder = tmp_path / kind.__name__
        tiny_models.build(tiny_models.config(kind, **experts), seed=0).save_pretrained(folder)
        assert told in refusal(train_config(str(folder), lora=LORA))


def test_an_adapter_of_another_shape_or_scale_is_refused(make: Make, tmp_path: Path) -> None:
    make().save(SaveLoadMeta(str(tmp_path)))
    for lora in (
        LoRAConfig(rank=2, alpha=12),
        LoRAConfig(rank=4, alpha=8),
        LoRAConfig(rank=4, alpha=12, target_modules=["q_proj"]),
    ):
        with pytest.raises(CheckpointError, match="with the layers, rank and alpha of the lora block"):
            make(lora=lora).load(SaveLoadMeta(str(tmp_path)))


def test_an_adapter_is_no_model_to_start_from(make: Make, tmp_path: Path) -> None:
    make().save(SaveLoadMeta(str(tmp_path)))
    assert "must hold a whole model: got " in refusal(train_config(str(tmp_path)))
    with pytest.raises(ValueError, match="must hold a whole model: got "):
        RewardModel(str(tmp_path), None)


def test_without_peft_its_extra_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"peft must be installed for lora: .*'arealite\[lora\]'"):
        make()
    make(lora=None)

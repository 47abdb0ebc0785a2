"""LoRA models in turn in one engine: each is trained as PEFT and torch would train it alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from peft import LoraConfig, inject_adapter_in_model
from tensordict import TensorDict

from arealite.api.cli_args import LoRAConfig, OptimizerConfig, PPOActorConfig
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.tinker.models import Models, Settings
from arealite.tinker.sampler import BASE
from arealite.utils.hf import load_causal_lm

RANK, ALPHA = 8, 32
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.01, "grad_clip_norm": 0.0}
VOCABULARY = 30
LENGTHS = (6, 3, 5)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("base"), seed=1)


@pytest.fixture
def models(path: str, tmp_path: Path) -> Iterator[Models]:
    optimizer = OptimizerConfig(lr=1.0, lr_scheduler_type="constant")
    lora = LoRAConfig(rank=RANK, alpha=ALPHA)
    actor = FSDPPPOActor(PPOActorConfig(path=path, dtype="float32", optimizer=optimizer, lora=lora))
    actor.initialize(None, None)
    yield Models(actor, None, tmp_path, 64)  # type: ignore[arg-type]  # nothing is published here
    actor.destroy()


def batch(seed: int = 0) -> TensorDict:
    """Targets are no shifted inputs, and weights differ."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    ids = [torch.randint(1, VOCABULARY, shape, generator=generator) * mask for _ in range(2)]
    weights = torch.rand(shape, generator=generator) * mask
    columns = {"input_ids": ids[0], "target_tokens": ids[1], "weights": weights, "attention_mask": mask}
    return TensorDict(columns, batch_size=[len(LENGTHS)])


def settings(models: Models, rank: int = RANK, **changes: bool) -> Settings:
    return Settings(models._actor.config.path, rank, **({"train_attn": True, "train_mlp": True} | changes))


def train(models: Models, model: str, seeds: list[int], *, accumulated: int = 1) -> list[float]:
    losses = []
    for index, seed in enumerate(seeds, 1):
        losses.append(models.forward_backward(model, batch(seed), "cross_entropy", {}, with_gradient=True)[1])
        if index % accumulated == 0:
            models.optim_step(model, ADAM)
    return losses


def adapter(models: Models, model: str) -> dict[str, torch.Tensor]:
    models._hold(model)
    return {name: one.full_tensor().detach().clone() for name, one in models._names.items()}


def test_steps_are_those_of_peft_and_torch(models: Models, path: str) -> None:
    """With a rank below the engine's, targets of our own, two backward passes for a step, and sums as losses."""
    rank = 4
    models.create("m", settings(models, rank), seed=3)
    start = adapter(models, "m")
    base = load_causal_lm(path, dtype=torch.float32)
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"), base
    )
    trained = {name: one for name, one in base.named_parameters() if "lora_" in name}
    ours = {f"base_model.model.{name.replace('.default.', '.')}": one for name, one in trained.items()}
    with torch.no_grad():
        for name, one in ours.items():
            one.copy_(start[name][:rank] if "lora_A" in name else start[name][:, :rank])
    for name, one in base.named_parameters():
        one.requires_grad_("lora_" in name)
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)
    losses, expected = train(models, "m", [0, 1, 2, 3], accumulated=2), []
    for seed in range(4):
        rows = batch(seed)
        logits = base(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].long()).logits
        logprobs = logits.log_softmax(-1).gather(-1, rows["target_tokens"][..., None])[..., 0]
        loss = -(logprobs * rows["weights"]).sum()
        loss.backward()
        expected.append(loss.item())
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=2e-5)
    found = adapter(models, "m")
    for name, one in ours.items():
        mine = found[name][:rank] if "lora_A" in name else found[name][:, :rank]
        assert torch.allclose(mine, one.detach(), rtol=1e-4, atol=2e-5), name
        rest = found[name][rank:] if "lora_A" in name else found[name][:, rank:]
        assert rest.abs().max() == 0
    logprobs_BS, _ = models.forward_backward("m", batch(), "cross_entropy", {}, with_gradient=False)
    rows = batch()
    logits = base(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].long()).logits
    want = logits.log_softmax(-1).gather(-1, rows["target_tokens"][..., None])[..., 0] * rows["attention_mask"]
    assert torch.allclose(logprobs_BS, want.detach(), atol=1e-4)


def test_models_in_turn_are_as_alone(models: Models) -> None:
    for name, rank in (("a", RANK), ("b", 4), ("alone", RANK)):
        models.create(name, settings(models, rank), seed=5)
    for seed in (0, 1):  # the turn of b is between a's backward pass and its step
        models.forward_backward("a", batch(seed), "cross_entropy", {}, with_gradient=True)
        train(models, "b", [seed + 10])
        models.logprobs(BASE, [1, 2, 3])
        models.optim_step("a", ADAM)
    train(models, "alone", [0, 1])
    found, alone = adapter(models, "a"), adapter(models, "alone")
    assert all(torch.equal(found[name], alone[name]) for name in found)


def test_a_checkpoint_continues_bit_for_bit(models: Models) -> None:
    path = "tinker://session:train:0/weights/first"
    models.create("m", settings(models), seed=5)
    train(models, "m", [0, 1])
    models.save("m", path, with_optim=True)
    losses = train(models, "m", [2, 3])
    for with_optim in (True, False):
        models.create("n", settings(models), seed=6)
        train(models, "n", [7])
        models.load("n", path, with_optim=with_optim)
        assert (train(models, "n", [2, 3]) == losses) is with_optim
    models.unload("n")
    tokens = [5, 6, 7, 8]
    row = TensorDict({"input_ids": torch.tensor([tokens[:-1]]), "target_tokens": torch.tensor([tokens[1:]])}, [1])
    row["attention_mask"], row["weights"] = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3)
    models.create("o", settings(models), seed=6)
    models.load("o", path, with_optim=False)
    by_trainer, _ = models.forward_backward("o", row, "cross_entropy", {}, with_gradient=False)
    assert models.logprobs(path, tokens)[1:] == pytest.approx(by_trainer[0].tolist(), abs=1e-5)
    assert models.logprobs(BASE, tokens)[1:] != pytest.approx(by_trainer[0].tolist(), abs=1e-3)


def test_layers_that_a_client_leaves_out(models: Models) -> None:
    models.create("m", settings(models, train_mlp=False), seed=5)
    train(models, "m", [0])
    moved = {name for name, one in adapter(models, "m").items() if "lora_B" in name and one.abs().max() > 0}
    assert moved and all("self_attn" in name for name in moved)


def test_what_is_refused(models: Models) -> None:
    models.create("m", settings(models), seed=5)
    with pytest.raises(ValueError, match=r"optim_step must follow a forward_backward: got no gradient. Call it first."):
        models.optim_step("m", ADAM)
    for path in (
        "tinker://a/weights/..",
        "tinker://../weights/a",
        "tinker://a/b",
        "/etc/passwd",
        "tinker://a/weights/.x",
    ):
        with pytest.raises(ValueError, match=r"the path of a checkpoint must be tinker://MODEL/weights/NAME"):
            models.folder_of(path)
    with pytest.raises(ValueError, match=r"must be a checkpoint of this server: got none in .* Save it first."):
        models.load("m", "tinker://a/weights/b", with_optim=False)
    models.create("low", settings(models, 4), seed=5)
    models.save("low", "tinker://a/weights/low", with_optim=False)
    with pytest.raises(
        ValueError, match=r"must be of the model's lora_rank: got 4 instead of 8. Make a model of that rank."
    ):
        models.load("m", "tinker://a/weights/low", with_optim=False)
    broken = batch()
    broken["weights"][0, 0] = math.inf
    models.forward_backward("m", broken, "cross_entropy", {}, with_gradient=True)
    with pytest.raises(ValueError, match=r"gradients must be finite: got a norm of"):
        models.optim_step("m", ADAM)
    assert train(models, "m", [0]) == pytest.approx(train(models, "low", [0]), rel=1e-6)  # B is still 0

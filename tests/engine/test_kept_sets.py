"""Truncated sampling through a real embedded server: the trainer's logprobs are over what the server sampled from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from tensordict import TensorDict
from testing_client import connected
from testing_lite import LiteServer
from testing_workflows import SamplingWorkflow
from training_cases import actor_config, gradient_norm
from transformers import AutoModelForCausalLM, PreTrainedModel

from arealite.api.cli_args import MicroBatchSpec
from arealite.api.io_struct import PromptId
from arealite.engine.ppo.actor import FSDPPPOActor

TEMPERATURE = 0.8
KEPT = ("kept_ids", "kept_counts")
ROWS = [{"prompt_id": PromptId(0, index), "input_ids": [5 + index, *range(6, 9 + 2 * index)]} for index in range(4)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def model(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sampled(path: str) -> TensorDict:
    """Return four groups of two, of different lengths."""
    server = LiteServer(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), eos_ids=frozenset({1}))
    with connected(server, backend="lite", consumer_batch_size=4) as rollout:  # type: ignore[arg-type]
        sampling = {"n_samples": 2, "max_new_tokens": 24, "temperature": TEMPERATURE, "top_p": 0.9, "top_k": 12}
        return rollout.rollout_batch(ROWS, SamplingWorkflow(**sampling))


@pytest.fixture
def make(start: Callable[..., Any], path: str) -> Callable[..., FSDPPPOActor]:
    fixed = {"group_size": 2, "ppo_n_minibatches": 1, "temperature": TEMPERATURE, "mb_spec": MicroBatchSpec(n_mbs=3)}
    return lambda **changes: start(FSDPPPOActor(actor_config(path, **fixed | changes)))


@pytest.fixture
def actor(make: Callable[..., FSDPPPOActor]) -> FSDPPPOActor:
    return make()


def kept_mass(batch: TensorDict, model: PreTrainedModel) -> torch.Tensor:
    """Return the mass `[B, T]` that the model gives to what each token was sampled from."""
    mass_BT = torch.ones(batch["input_ids"].shape)
    with torch.no_grad():
        logits_BTV = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for row in range(len(batch)):
        ids = batch["kept_ids"][row].split(
            [*(counts := batch["kept_counts"][row].tolist()), len(batch["kept_ids"][row]) - sum(counts)]
        )
        for place, count in enumerate(counts):
            if count:
                probs_V = (logits_BTV[row, place - 1] / TEMPERATURE).softmax(-1)
                mass_BT[row, place] = probs_V[ids[place].long()].sum()
    return mass_BT


def test_at_equal_weights_every_ratio_is_1_and_without_the_kept_sets_it_is_their_mass(
    actor: FSDPPPOActor, sampled: TensorDict, model: PreTrainedModel
) -> None:
    mask_BT = sampled["loss_mask"].bool()
    assert ((sampled["kept_counts"] > 0) == mask_BT).all() and len(set(sampled["kept_counts"][mask_BT].tolist())) > 3
    ratio_N = (actor.compute_logprobs(sampled) - sampled["logprobs"])[mask_BT].exp()
    torch.testing.assert_close(ratio_N, torch.ones_like(ratio_N), atol=1e-5, rtol=0)
    whole_N = (actor.compute_logprobs(sampled.exclude(*KEPT)) - sampled["logprobs"])[mask_BT].exp()
    mass_N = kept_mass(sampled, model)[mask_BT]
    torch.testing.assert_close(whole_N, mass_N, atol=1e-5, rtol=0)
    assert mass_N.min() < 0.9 < mass_N.max() < 1
    torch.testing.assert_close(
        actor.compute_logprobs(sampled, whole=True), actor.compute_logprobs(sampled.exclude(*KEPT))
    )


def test_an_update_begins_at_ratio_1_with_the_gradient_of_what_was_sampled(
    actor: FSDPPPOActor, sampled: TensorDict, model: PreTrainedModel
) -> None:
    batch, mask_BT = sampled.clone(), sampled["loss_mask"].bool()
    actor.compute_advantages(batch)
    advantages_BT = batch["advantages"]
    metrics = actor.ppo_update(batch)
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    model.zero_grad()
    logits_BTV = (
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1] / TEMPERATURE
    )
    excluded_BTV = torch.zeros(logits_BTV.shape, dtype=torch.bool)
    for row, counts in enumerate(batch["kept_counts"].tolist()):
        for place, ids in enumerate(batch["kept_ids"][row, : sum(counts)].split(counts)):
            if len(ids):
                excluded_BTV[row, place - 1] = True
                excluded_BTV[row, place - 1, ids.long()] = False
    logprobs_BTV = logits_BTV.masked_fill(excluded_BTV, -1e30).log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    (-(logprobs_BT * advantages_BT[:, 1:])[mask_BT[:, 1:]].sum() / mask_BT.sum()).backward()
    assert metrics["optim/grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-4)
    entropy_BT = torch.distributions.Categorical(logits=logits_BTV).entropy()
    assert metrics["policy/entropy"] == pytest.approx(entropy_BT[mask_BT[:, 1:]].mean().item(), rel=1e-4), (
        "of the whole"
    )


def test_a_reference_uses_the_whole_vocabulary(make: Callable[..., FSDPPPOActor], sampled: TensorDict) -> None:
    reference = make(optimizer=None)
    assert torch.equal(reference.compute_logprobs(sampled), reference.compute_logprobs(sampled.exclude(*KEPT)))


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_penalty_compares_whole_distributions(
    make: Callable[..., FSDPPPOActor], sampled: TensorDict, kl_in: str
) -> None:
    """A reference with other weights: over kept sets the divergence would be off by the logarithm of their mass."""
    estimator = "k1" if kl_in == "reward" else "k3"
    actor = make(kl_ctl=0.5, kl_in=kl_in, kl_estimator=estimator, baseline="none", adv_norm=False)
    batch, mask_BT = sampled.clone(), sampled["loss_mask"].bool()
    batch["rewards"] = torch.zeros(len(batch))
    whole_BT = actor.compute_logprobs(batch, whole=True)
    batch["ref_logprobs"] = whole_BT + torch.linspace(-0.3, 0.4, whole_BT.numel()).reshape(whole_BT.shape) * mask_BT
    log_ratio_N = (whole_BT - batch["ref_logprobs"])[mask_BT]
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    k3_N = log_ratio_N.neg().expm1() + log_ratio_N
    assert metrics["policy/ref_kl"] == pytest.approx(k3_N.mean().item(), rel=1e-3)
    if kl_in == "loss":
        assert metrics["policy/loss"] == pytest.approx(0.5 * k3_N.mean().item(), rel=1e-3)
    else:
        later_BT = (whole_BT - batch["ref_logprobs"]).flip(1).cumsum(1).flip(1)
        torch.testing.assert_close(batch["advantages"][mask_BT], -0.5 * later_BT[mask_BT], atol=1e-4, rtol=1e-4)

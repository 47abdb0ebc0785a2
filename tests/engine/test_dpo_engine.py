"""DPO and IPO on an engine: the reference's numbers, gradients of plain autograd, and any split of the pairs."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from training_cases import OPTIMIZER, gradients, pair_batch, plain_logprobs, train_config, write_model
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import DPOEngineConfig, OptimizerConfig
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine

Make = Callable[..., FSDPDPOEngine]


@pytest.fixture
def make(start: Callable[..., Any]) -> Make:
    def make_engine(path: str, max_tokens: int | None = None, **changes: Any) -> FSDPDPOEngine:
        values = train_config(path, max_tokens=max_tokens).model_dump(exclude_unset=True)
        return start(FSDPDPOEngine(DPOEngineConfig(**values | changes)))

    return make_engine


def referenced(batch: TensorDict, path: str, make: Make) -> TensorDict:
    batch["ref_logprobs"] = make(path, optimizer=None).compute_logprobs(batch)
    return batch


def slow_losses(model: Any, batch: TensorDict, loss_type: str, beta: float) -> torch.Tensor:
    """Return the loss of each pair, row by row from logits without padding."""
    scores = []
    for log_ratios, mask in zip(plain_logprobs(model, batch) - batch["ref_logprobs"], batch["loss_mask"].bool()):
        scores.append(log_ratios[mask].sum() if loss_type == "dpo" else log_ratios[mask].mean())
    gaps = [chosen - rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
    if loss_type == "dpo":
        return torch.stack([-(1 / (1 + (-beta * gap).exp())).log() for gap in gaps])
    return torch.stack([(gap - 1 / (2 * beta)) ** 2 for gap in gaps])


@pytest.mark.parametrize("loss_type", ["dpo", "ipo"])
def test_loss_and_gradient_are_those_of_plain_autograd_for_any_split(
    lm_path: str, make: Make, tmp_path: Path, loss_type: str
) -> None:
    other = write_model(tmp_path, seed=1)
    batch = referenced(pair_batch(5), other, make)
    model = AutoModelForCausalLM.from_pretrained(lm_path)
    losses = slow_losses(model, batch, loss_type, beta=0.3)
    losses.mean().backward()
    expected = dict(model.named_parameters())
    for max_tokens in (None, 30, 1):
        engine = make(lm_path, max_tokens, loss_type=loss_type, beta=0.3)
        assert engine.train_dpo(batch)["dpo/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        for name, gradient in gradients(engine).items():
            reference = expected[name].grad
            torch.testing.assert_close(gradient, reference, atol=1e-5 * float(reference.abs().max()) + 1e-7, rtol=1e-4)


def test_the_policy_learns_what_is_preferred(lm_path: str, make: Make) -> None:
    batch = referenced(pair_batch(6), lm_path, make)
    engine = make(lm_path, optimizer=OptimizerConfig(**OPTIMIZER | {"lr": 2e-3}))
    assert engine.evaluate_dpo(batch)["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    first, *_, last = [engine.train_dpo(copy.copy(batch)) for _ in range(8)]
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6) and first["dpo/accuracy"] < 1
    assert last["dpo/accuracy"] == 1.0 and last["dpo/margin"] > 0.5 and last["dpo/loss"] < 0.5
    assert last["dpo/margin"] == pytest.approx(last["dpo/chosen_reward"] - last["dpo/rejected_reward"], rel=1e-5)
    gained = last["dpo/chosen_logprob"] - first["dpo/chosen_logprob"]
    assert last["dpo/chosen_reward"] == pytest.approx(0.1 * gained, abs=1e-5)
    assert last["perf/processed_tokens"] == float(batch["attention_mask"].sum())


def test_a_batch_without_reference_or_with_half_a_pair_is_refused(lm_path: str, make: Make) -> None:
    engine, batch = make(lm_path), pair_batch(2)
    with pytest.raises(ValueError, match=r"must have 'ref_logprobs': got .* Set it to ref\.compute_logprobs"):
        engine.train_dpo(batch)
    batch["ref_logprobs"] = torch.zeros(batch["input_ids"].shape)
    with pytest.raises(ValueError, match="units of 2: got 3 rows"):
        engine.train_dpo(batch[:3])

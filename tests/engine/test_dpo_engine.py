"""DPO and IPO on an engine: the reference's numbers, gradients of plain autograd, and any split of the pairs."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from training_cases import OPTIMIZER, pair_batch, write_model
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import DPOEngineConfig, MicroBatchSpec, OptimizerConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine

torch.set_num_threads(1)
SPEC = FinetuneSpec(1, 100, 10)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def config(path: str, max_tokens: int | None = None, **changes: Any) -> DPOEngineConfig:
    values = {
        "dtype": "float32",
        "gradient_checkpointing": False,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=max_tokens),
    }
    return DPOEngineConfig(path=path, **values | {"optimizer": OptimizerConfig(**OPTIMIZER)} | changes)


class Engines:
    """Makes engines and ends them."""

    def __init__(self) -> None:
        self.made: list[FSDPDPOEngine] = []

    def __call__(self, config: DPOEngineConfig) -> FSDPDPOEngine:
        self.made.append(FSDPDPOEngine(config))
        self.made[-1].initialize(None, SPEC)
        return self.made[-1]


@pytest.fixture
def make() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    for engine in engines.made:
        engine.destroy()


def referenced(batch: TensorDict, path: str, make: Engines) -> TensorDict:
    batch["ref_logprobs"] = make(config(path, optimizer=None)).compute_logprobs(batch)
    return batch


def gradients(engine: FSDPDPOEngine, batch: TensorDict) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the metrics of a step and the gradients that its optimizer gets."""
    seen: dict[str, torch.Tensor] = {}

    def read(*_: object) -> None:
        seen.update({name: one.grad.full_tensor().clone() for name, one in engine.model.named_parameters()})

    handle = engine.optimizer.register_step_pre_hook(read)
    metrics = engine.train_dpo(batch)
    handle.remove()
    return metrics, seen


def test_at_the_reference_the_loss_is_log_2(path: str, make: Engines) -> None:
    batch = referenced(pair_batch(5), path, make)
    found = make(config(path)).evaluate_dpo(batch)
    assert found["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found["eval/margin"] == pytest.approx(0, abs=1e-6)
    assert make(config(path, loss_type="ipo")).evaluate_dpo(batch)["eval/loss"] == pytest.approx(25.0, abs=1e-3)


def slow_losses(model: Any, batch: TensorDict, loss_type: str, beta: float) -> torch.Tensor:
    """Return the loss of each pair, row by row from logits without padding."""
    scores = []
    for row in batch:
        length = int(row["attention_mask"].sum())
        logprobs = model(row["input_ids"][None, :length]).logits[0].log_softmax(-1)[:-1]
        log_ratios = logprobs.gather(1, row["input_ids"][1:length, None])[:, 0] - row["ref_logprobs"][1:length]
        kept = log_ratios[row["loss_mask"][1:length].bool()]
        scores.append(kept.sum() if loss_type == "dpo" else kept.mean())
    gaps = [chosen - rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
    if loss_type == "dpo":
        return torch.stack([-(1 / (1 + (-beta * gap).exp())).log() for gap in gaps])
    return torch.stack([(gap - 1 / (2 * beta)) ** 2 for gap in gaps])


@pytest.mark.parametrize("loss_type", ["dpo", "ipo"])
def test_loss_and_gradient_are_those_of_plain_autograd_for_any_split(
    path: str, make: Engines, tmp_path: Path, loss_type: str
) -> None:
    other = write_model(tmp_path, seed=1)
    batch = referenced(pair_batch(5), other, make)
    model = AutoModelForCausalLM.from_pretrained(path)
    losses = slow_losses(model, batch, loss_type, beta=0.3)
    losses.mean().backward()
    expected = dict(model.named_parameters())
    for max_tokens in (None, 30, 1):
        metrics, found = gradients(make(config(path, max_tokens, loss_type=loss_type, beta=0.3)), batch)
        assert metrics["dpo/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        for name, gradient in found.items():
            reference = expected[name].grad
            torch.testing.assert_close(gradient, reference, atol=1e-5 * float(reference.abs().max()) + 1e-7, rtol=1e-4)


def test_pairs_of_a_micro_batch_are_those_of_the_batch(path: str, make: Engines) -> None:
    """Rows dealt one by one would pair a chosen answer with another prompt's rejected one."""
    batch = referenced(pair_batch(4), path, make)
    batch["ref_logprobs"] = batch["ref_logprobs"] + torch.arange(8)[:, None] * 0.1 * (-1) ** torch.arange(8)[:, None]
    whole = make(config(path)).evaluate_dpo(batch)
    split = make(config(path, 25)).evaluate_dpo(batch)
    assert split == pytest.approx(whole, rel=1e-5)
    swapped = batch[[1, 0, 3, 2, 5, 4, 7, 6]]
    assert make(config(path)).evaluate_dpo(swapped)["eval/margin"] == pytest.approx(-whole["eval/margin"], rel=1e-5)


def test_the_policy_learns_what_is_preferred(path: str, make: Engines) -> None:
    batch = referenced(pair_batch(6), path, make)
    engine = make(config(path, optimizer=OptimizerConfig(**OPTIMIZER | {"lr": 2e-3})))
    first, *_, last = [engine.train_dpo(copy.copy(batch)) for _ in range(8)]
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6) and first["dpo/accuracy"] < 1
    assert last["dpo/accuracy"] == 1.0 and last["dpo/margin"] > 0.5 and last["dpo/loss"] < 0.5
    assert last["dpo/margin"] == pytest.approx(last["dpo/chosen_reward"] - last["dpo/rejected_reward"], rel=1e-5)
    gained = last["dpo/chosen_logprob"] - first["dpo/chosen_logprob"]
    assert last["dpo/chosen_reward"] == pytest.approx(0.1 * gained, abs=1e-5)
    assert last["perf/processed_tokens"] == float(batch["attention_mask"].sum())


def test_a_batch_without_reference_or_with_half_a_pair_is_refused(path: str, make: Engines) -> None:
    engine, batch = make(config(path)), pair_batch(2)
    with pytest.raises(ValueError, match=r"must have 'ref_logprobs': got .* Set it to ref\.compute_logprobs"):
        engine.train_dpo(batch)
    batch["ref_logprobs"] = torch.zeros(batch["input_ids"].shape)
    with pytest.raises(ValueError, match="units of 2: got 3 rows"):
        engine.train_dpo(batch[:3])

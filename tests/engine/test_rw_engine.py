"""Reward models: numbers of plain transformers, the score's position, and their use as reward and critic."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tensordict import TensorDict
from testing_quickstart import make_tiny_model
from training_cases import OPTIMIZER, critic_config, gradients, pair_batch, train_config, write_classifier
from transformers import AutoModelForSequenceClassification

from arealite.api.cli_args import OptimizerConfig, RWEngineConfig
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.rw.reward_model import RewardModel
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.reward.runner import RewardRunner
from arealite.utils.hf import load_hf_tokenizer

Make = Callable[..., FSDPRWEngine]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_classifier(tmp_path_factory.mktemp("classifier"))
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make(start: Callable[..., Any]) -> Make:
    def make_engine(path: str, max_tokens: int | None = None, **changes: Any) -> FSDPRWEngine:
        values = train_config(path, max_tokens=max_tokens).model_dump(exclude_unset=True)
        return start(FSDPRWEngine(RWEngineConfig(**values | changes)))

    return make_engine


def slow_scores(model: Any, batch: TensorDict) -> torch.Tensor:
    """Return the score of each row, fed to transformers alone and without padding."""
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    rows = [ids[None, :length] for ids, length in zip(batch["input_ids"], lengths, strict=True)]
    return torch.cat([model.score(model.model(row).last_hidden_state[0, -1:]).view(1) for row in rows])


@pytest.mark.parametrize("center", [0.0, 0.05])
def test_loss_and_gradient_are_those_of_plain_autograd_for_any_split(path: str, make: Make, center: float) -> None:
    batch = pair_batch(5)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    chosen, rejected = slow_scores(model, batch).view(-1, 2).unbind(1)
    loss = (-(1 / (1 + (rejected - chosen).exp())).log() + center * (chosen + rejected) ** 2).mean()
    loss.backward()
    for max_tokens in (None, 30, 1):
        engine = make(path, max_tokens, center=center)
        assert engine.evaluate_rw(batch)["eval/loss"] == pytest.approx(loss.item(), rel=1e-5)
        metrics = engine.train_rw(batch)
        assert metrics["rw/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["rw/accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
        for name, gradient in gradients(engine).items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, atol=1e-5 * float(expected.abs().max()) + 1e-7, rtol=1e-4)


def test_the_score_is_of_the_last_token_although_padding_has_its_id(path: str, make: Make) -> None:
    batch = pair_batch(3)
    ends = batch["attention_mask"].sum(dim=1) - 1
    batch["input_ids"][torch.arange(6), ends] = tiny_models.EOS
    expected = slow_scores(AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32), batch)
    engine = make(path)
    for pad in (0, tiny_models.EOS):
        batch["input_ids"] = torch.where(batch["attention_mask"], batch["input_ids"], pad)
        torch.testing.assert_close(engine.compute_scores(batch), expected.detach(), atol=1e-5, rtol=1e-5)


def test_what_was_learned_is_saved_scores_completions_and_starts_a_critic(
    start: Callable[..., Any], path: str, make: Make, tmp_path: Path
) -> None:
    batch, engine = pair_batch(6), make(path, optimizer=OptimizerConfig(**OPTIMIZER | {"lr": 2e-3}))
    *_, last = [engine.train_rw(batch) for _ in range(15)]
    assert last["rw/accuracy"] == 1.0 and last["rw/loss"] < 0.2
    assert last["rw/margin"] == pytest.approx(last["rw/chosen_reward"] - last["rw/rejected_reward"], abs=1e-5)
    saved = str(tmp_path / "saved")
    engine.save(SaveLoadMeta(path=saved, tokenizer=tiny_models.tokenizer()))
    rows = [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    expected = engine.compute_scores(batch).tolist()
    judge = RewardModel(saved, tiny_models.tokenizer(), dtype="float32", max_tokens=25)
    assert judge.score(rows) == pytest.approx(expected, abs=1e-4) and judge.score([]) == []

    async def concurrently() -> list[float]:
        runner = RewardRunner(judge)
        try:
            calls = [runner(prompt_ids=row[:2], completion_ids=row[2:], prompt="", completions="") for row in rows]
            return await asyncio.gather(*calls)
        finally:
            runner.close()

    assert asyncio.run(concurrently()) == pytest.approx(expected, abs=1e-4)
    assert start(FSDPPPOCritic(critic_config(saved))).fingerprint() == make(saved).fingerprint()


def test_completions_that_wait_are_scored_together_and_survive_a_cancelled_one(path: str) -> None:
    judge = RewardModel(path, tiny_models.tokenizer(), dtype="float32")
    sizes, score = [], judge.score

    def counted(rows: list[list[int]]) -> list[float]:
        sizes.append(len(rows))
        return score(rows)

    judge.score = counted  # type: ignore[method-assign]

    async def cancel_the_first() -> list[Any]:
        tasks = [asyncio.create_task(judge([5, n], [7])) for n in range(2, 12)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, *found = asyncio.run(cancel_the_first())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert found == pytest.approx(score([[5, n, 7] for n in range(3, 12)]), abs=1e-5)
    assert len(sizes) <= 3 and not judge._waiting


def test_a_language_model_or_other_tokens_are_refused(path: str, lm_path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a reward model must be a sequence classifier: got .*, which has no head"):
        RewardModel(lm_path, tiny_models.tokenizer())
    other = load_hf_tokenizer(make_tiny_model(tmp_path / "other", ["one two"] * 20, layers=1))
    with pytest.raises(ValueError, match="must have the vocabulary of the policy"):
        RewardModel(path, other)

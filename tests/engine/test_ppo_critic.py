"""The critic: values are those of transformers a token earlier, updates what plain autograd says; it learns returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from training_cases import (
    OPTIMIZER,
    actor_config,
    critic_config,
    full_params,
    gradients,
    trajectory_batch,
)
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from arealite.algorithms.advantages import gae, token_rewards
from arealite.api.cli_args import MicroBatchSpec, OptimizerConfig
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic

LENGTHS = [9, 4, 12, 3, 7, 11, 8, 8]
Make = Callable[..., FSDPPPOCritic]
MakeActor = Callable[..., FSDPPPOActor]


@pytest.fixture(scope="module")
def path(lm_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model."""
    model = AutoModelForSequenceClassification.from_pretrained(lm_path, num_labels=1, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model.score.weight.normal_(0, 0.2)
    folder = tmp_path_factory.mktemp("reward_model")
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(start: Callable[..., Any], path: str) -> Make:
    def make_critic(**changes: object) -> FSDPPPOCritic:
        # With so large an eps AdamW does not magnify the rounding of tiny gradients.
        optimizer = OptimizerConfig(**OPTIMIZER | {"eps": 1e-2})
        values = {"ppo_n_minibatches": 1, "group_size": 2, "optimizer": optimizer} | changes
        return start(FSDPPPOCritic(critic_config(path, **values)))

    return make_critic


@pytest.fixture
def make_actor(start: Callable[..., Any], lm_path: str) -> MakeActor:
    return lambda **changes: start(FSDPPPOActor(actor_config(lm_path, algorithm="ppo", group_size=2, **changes)))


def a_batch(critic: FSDPPPOCritic) -> TensorDict:
    """Old values that have drifted from the critic's, and returns that are no two alike."""
    batch = trajectory_batch(LENGTHS, 2)
    mask = batch["loss_mask"].bool()
    batch["values"] = (critic.compute_values(batch) + 0.4 * torch.sin(torch.arange(12.0))) * batch["attention_mask"]
    rewards = token_rewards(batch["rewards"], mask)
    values = batch["values"] * mask
    batch["returns"] = gae(rewards, values, mask, discount=1.0, gae_lambda=0.9) + values
    batch["returns_mask"] = mask
    return batch


def hf_values(model: PreTrainedModel, batch: TensorDict) -> torch.Tensor:
    """Return the score of transformers at the token before each one, row by row."""
    values = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        hidden = model.model(input_ids=batch["input_ids"][row : row + 1, :length]).last_hidden_state
        values[row, 1:length] = model.score(hidden)[0, :-1, 0]
    return values


def test_values_are_the_scores_a_token_earlier(make: Make, path: str) -> None:
    batch = trajectory_batch(LENGTHS, 2)
    values = make(mb_spec=MicroBatchSpec(max_tokens_per_mb=15)).compute_values(batch)
    with torch.no_grad():
        expected = hf_values(AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32), batch)
    assert expected.std() > 0.1
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("eps_clip", [None, 0.2])
def test_an_update_is_that_of_plain_autograd(make: Make, path: str, eps_clip: float | None) -> None:
    critic = make(value_eps_clip=eps_clip)
    batch = a_batch(critic)
    metrics = critic.ppo_update(batch)
    model, mask = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32), batch["returns_mask"]
    found, returns, old = (tensor[mask] for tensor in (hf_values(model, batch), batch["returns"], batch["values"]))
    losses = 0.5 * (found - returns) ** 2
    if eps_clip is not None:
        clipped = 0.5 * (old + (found - old).clamp(-eps_clip, eps_clip) - returns) ** 2
        assert metrics["value/clip_ratio"] == pytest.approx((clipped > losses).float().mean().item())
        assert metrics["value/clip_ratio"] > 0.1
        losses = torch.maximum(losses, clipped)
    losses.mean().backward()
    assert metrics["value/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    for name, gradient in gradients(critic).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=1e-5, rtol=1e-4)
    explained = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
    assert metrics["value/explained_variance"] == pytest.approx(explained.item(), rel=1e-4)
    assert metrics["value/mean"] == pytest.approx(old.mean().item(), rel=1e-5)
    assert metrics["value/return"] == pytest.approx(returns.mean().item(), rel=1e-5)


def test_neither_split_nor_order_of_rows_changes_an_update(make: Make) -> None:
    found = []
    order = torch.tensor([5, 0, 3, 7, 1, 6, 2, 4])
    for rows, spec in ((torch.arange(8), MicroBatchSpec()), (order, MicroBatchSpec(max_tokens_per_mb=15))):
        critic = make(mb_spec=spec, ppo_n_minibatches=3)
        found.append((critic.ppo_update(a_batch(critic)[rows]), list(full_params(critic).values())))
    assert found[0][0] == pytest.approx(found[1][0], rel=2e-4, abs=2e-5)
    assert found[0][0]["value/skipped_steps"] == 0 and found[0][0]["value/grad_norm"] > 1e-3
    for one, two in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def test_minibatches_are_the_groups_of_the_actor(make: Make) -> None:
    """With two of them, first groups 0 and 2, then 1 and 3; one step each equals an update by hand."""
    critic, by_hand = make(ppo_n_minibatches=2), make()
    batch = a_batch(critic)
    critic.ppo_update(batch)
    for index in range(2):
        rows = batch["group_index"] % 2 == index
        by_hand.ppo_update(batch[rows])
    assert critic.fingerprint() == by_hand.fingerprint()


def test_the_returns_have_a_lambda_of_their_own(make: Make, make_actor: MakeActor) -> None:
    """With 1, and without discount, the return of every token is the reward of the answer."""
    batch = a_batch(make())
    mask = batch["loss_mask"].bool()
    for returns_lambda, expected_lambda in ((1.0, 1.0), (None, 0.95)):
        actor = make_actor(returns_lambda=returns_lambda, adv_norm=False)
        actor.compute_advantages(batch)
        rewards, values = token_rewards(batch["rewards"], mask), batch["values"] * mask
        expected = gae(rewards, values, mask, discount=1.0, gae_lambda=expected_lambda) + values
        torch.testing.assert_close(batch["returns"], expected)
        advantages = gae(rewards, values, mask, discount=1.0, gae_lambda=0.95)
        torch.testing.assert_close(batch["advantages"], advantages)
        if returns_lambda == 1.0:
            torch.testing.assert_close(batch["returns"], batch["rewards"][:, None] * mask)


def test_cut_off_answers_that_are_left_out_teach_the_critic_nothing(make: Make, make_actor: MakeActor) -> None:
    critic = make()
    batch = a_batch(critic)
    batch["no_eos"] = torch.arange(8) == 2
    batch["values"][2] = torch.nan
    make_actor(truncated="mask").compute_advantages(batch)
    assert not batch["returns_mask"][2].any() and (batch["returns"][2] == 0).all()
    assert batch["returns_mask"].sum() == sum(LENGTHS) - 16 - (LENGTHS[2] - 2)
    metrics = critic.ppo_update(batch)
    assert metrics["value/skipped_steps"] == 0 and metrics["value/loss"] < 100.0, "a NaN is not"


def test_a_batch_can_be_described_without_an_update(make: Make, make_actor: MakeActor) -> None:
    """As a step of warm-up is."""
    actor, batch = make_actor(), a_batch(make())
    described = actor.describe(batch)
    assert described["reward/mean"] == pytest.approx(batch["rewards"].mean().item())
    assert described["perf/trained_tokens"] == sum(LENGTHS) - 16
    actor.compute_advantages(batch)
    assert described.items() <= actor.ppo_update(batch).items() and not any("loss" in key for key in described)


def test_what_is_missing_is_named(make: Make, make_actor: MakeActor, lm_path: str) -> None:
    batch = trajectory_batch(LENGTHS, 2)
    with pytest.raises(
        ValueError, match=r"must have 'values' with baseline: critic: .* critic\.compute_values\(batch\)"
    ):
        make_actor().compute_advantages(batch)
    with pytest.raises(
        ValueError, match=r"must have 'returns' with a critic: .* Call actor\.compute_advantages\(batch\)"
    ):
        make().ppo_update(batch)

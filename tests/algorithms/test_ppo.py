import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algorithms.ppo import ppo_actor_loss_fn

LOG = math.log


def three_tokens() -> dict[str, torch.Tensor]:
    """Ratios 1.5, 0.5, 4 to the proximal policy; weights 2, 1, 0.5 of it to the sampling one; advantages 1, -1, -2."""
    proximal = torch.tensor([-1.0, -2.0, -3.0])
    return {
        "logprobs": proximal + torch.tensor([LOG(1.5), LOG(0.5), LOG(4.0)]),
        "proximal_logprobs": proximal,
        "rollout_logprobs": proximal - torch.tensor([LOG(2.0), 0.0, LOG(0.5)]),
        "advantages": torch.tensor([1.0, -1.0, -2.0]),
    }


def test_three_tokens_by_hand() -> None:
    loss, statistics = ppo_actor_loss_fn(**three_tokens(), eps_clip=0.2, loss_mask=torch.ones(3))
    # token losses: clipped -1.2, clipped 0.8, unclipped 8; times the weights 2, 1, 0.5; over 3 tokens
    assert loss.item() == pytest.approx((-1.2 * 2 + 0.8 * 1 + 8.0 * 0.5) / 3)
    assert statistics["clip_ratio"].tolist() == [True, True, False]
    torch.testing.assert_close(statistics["ratio"], torch.tensor([1.5, 0.5, 4.0]))
    torch.testing.assert_close(statistics["rollout_importance_weight"], torch.tensor([2.0, 1.0, 0.5]))


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    loss, statistics = ppo_actor_loss_fn(**three_tokens(), eps_clip=0.2, loss_mask=torch.ones(3), c_clip=3.0)
    assert loss.item() == pytest.approx((-1.2 * 2 + 0.8 * 1 + 6.0 * 0.5) / 3)
    assert statistics["dual_clip_ratio"].tolist() == [False, False, True]


def test_tokens_above_the_cap_leave_the_sum_but_not_the_count() -> None:
    loss, statistics = ppo_actor_loss_fn(
        **three_tokens(), eps_clip=0.2, loss_mask=torch.ones(3), behav_imp_weight_cap=1.5
    )
    assert loss.item() == pytest.approx((0.8 * 1 + 8.0 * 0.5) / 3)
    assert statistics["rollout_importance_dropped_ratio"].tolist() == [True, False, False]


def test_masked_tokens_play_no_part_whatever_they_hold() -> None:
    tensors = three_tokens()
    tensors["logprobs"] = tensors["logprobs"].clone()
    tensors["rollout_logprobs"][0] = -1e4
    tensors["logprobs"][0] = 1e4
    tensors["logprobs"].requires_grad_()
    loss, statistics = ppo_actor_loss_fn(**tensors, eps_clip=0.2, loss_mask=torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx((0.8 * 1 + 8.0 * 0.5) / 2)
    loss.backward()
    # clipped tokens have no gradient; the third: d(8 * ratio / 4)/dlogprob * weight / 2
    assert tensors["logprobs"].grad.tolist() == pytest.approx([0.0, 0.0, 8.0 * 0.5 / 2])
    assert statistics["rollout_importance_weight"][0].item() == 1.0


def test_no_loss_tokens_give_zero() -> None:
    loss, _ = ppo_actor_loss_fn(**three_tokens(), eps_clip=0.2, loss_mask=torch.zeros(3))
    assert loss.item() == 0.0


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3)), min_size=1, max_size=8))
def test_decoupled_with_proximal_equal_to_rollout_is_plain_ppo(tokens: list[tuple[float, float, float]]) -> None:
    logprobs, old_logprobs, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens))
    loss, _ = ppo_actor_loss_fn(logprobs, old_logprobs, old_logprobs, advantages, 0.2, torch.ones(len(tokens)))
    plain = 0.0
    for logprob, old, advantage in zip(logprobs.tolist(), old_logprobs.tolist(), advantages.tolist()):
        ratio = math.exp(logprob - old)
        plain -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert loss.item() == pytest.approx(plain / len(tokens), rel=1e-9, abs=1e-9)

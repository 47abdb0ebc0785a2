import itertools
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
    assert statistics["clip_ratio_high"].tolist() == [True, False, False]
    assert statistics["clip_ratio_low"].tolist() == [False, True, False]
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


@pytest.mark.parametrize("gap", [20.0, 25.0, 9998.0, float("inf")])
def test_without_a_cap_a_weight_at_the_bound_leaves_the_sum_but_not_the_count(gap: float) -> None:
    tokens = {name: tensor.double() for name, tensor in three_tokens().items()}
    tokens["rollout_logprobs"][0] = tokens["proximal_logprobs"][0] - gap
    loss, statistics = ppo_actor_loss_fn(**tokens, eps_clip=0.2, loss_mask=torch.ones(3))
    assert loss.item() == pytest.approx((0.8 * 1 + 8.0 * 0.5) / 3, rel=1e-6)
    assert statistics["rollout_importance_dropped_ratio"].tolist() == [True, False, False]
    tokens["rollout_logprobs"][0] = tokens["proximal_logprobs"][0] - 19.0
    loss, statistics = ppo_actor_loss_fn(**tokens, eps_clip=0.2, loss_mask=torch.ones(3))
    assert loss.item() == pytest.approx((-1.2 * math.exp(19) + 0.8 * 1 + 8.0 * 0.5) / 3, rel=1e-12)
    assert not statistics["rollout_importance_dropped_ratio"].any()


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


@pytest.mark.parametrize("gap", [95.0, 9998.0, float("inf")])
@pytest.mark.parametrize("far", ["logprobs", "proximal_logprobs", "rollout_logprobs"])
def test_one_extreme_token_leaves_the_gradients_of_the_others(far: str, gap: float) -> None:
    """It gets none itself: it is clipped, left out, or beyond what the loss tells apart."""
    for advantage, cap, c_clip in itertools.product((1.0, -1.0), (None, 5.0), (None, 3.0)):
        tokens = {name: torch.cat([tensor, torch.full((1,), -1.0)]) for name, tensor in three_tokens().items()}
        tokens["advantages"][3] = advantage
        tokens[far][3] -= gap
        gradients = []
        for tensors in (three_tokens(), tokens):
            tensors["logprobs"] = tensors["logprobs"].clone().requires_grad_()
            mask = torch.ones(len(tensors["logprobs"]))
            loss, _ = ppo_actor_loss_fn(
                **tensors, eps_clip=0.2, loss_mask=mask, c_clip=c_clip, behav_imp_weight_cap=cap
            )
            (loss * len(mask)).backward()
            gradients.append(tensors["logprobs"].grad)
        torch.testing.assert_close(gradients[1][:3], gradients[0])
        assert gradients[1][3].item() == 0.0


def test_ratios_are_bounded_by_the_exponential_of_20() -> None:
    tokens = {name: torch.tensor([value]) for name, value in zip(three_tokens(), (-1.0, -99.0, -1.0, -1.0))}
    loss, statistics = ppo_actor_loss_fn(**tokens, eps_clip=0.2, loss_mask=torch.ones(1))
    assert statistics["ratio"].item() == pytest.approx(math.exp(20))
    assert loss.item() == pytest.approx(math.exp(20) * math.exp(-20))


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

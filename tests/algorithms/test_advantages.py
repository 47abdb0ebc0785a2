import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import Reduce, on_two_ranks

from arealite.algorithms.advantages import (
    Samples,
    advantages_of,
    gae,
    overlong_penalty,
    reward_advantages,
    token_rewards,
    whiten,
)
from arealite.api.cli_args import PPOActorConfig, resolve_choices


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_rows_of_a_group_may_lie_on_two_ranks(rows: list[tuple[float, int, bool]]) -> None:
    values, groups, is_on_rank0 = (torch.tensor(column) for column in zip(*rows))
    whole = whiten(values, groups, 4)

    def of_rank(rank: int, reduce: Reduce) -> torch.Tensor:
        mine = is_on_rank0 == (rank == 0)
        return whiten(values[mine], groups[mine], 4, reduce=reduce)

    on_rank0, on_rank1 = on_two_ranks(of_rank)
    torch.testing.assert_close(on_rank0, whole[is_on_rank0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(on_rank1, whole[~is_on_rank0], atol=1e-6, rtol=1e-5)


TRAINED = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0]]).bool()


def samples_of(rewards: list[float], of_rows: tuple[int, ...] = (0, 1, 2, 3)) -> Samples:
    """Return samples in groups of two; each has as many tokens as `TRAINED` has in its rows."""
    num = len(rewards)
    num_tokens = torch.zeros(num, dtype=torch.long).index_add(0, torch.tensor(of_rows), TRAINED.sum(dim=1))
    return Samples(
        rewards=torch.tensor(rewards),
        groups=torch.arange(num) // 2,
        num_groups=num // 2,
        num_tokens=num_tokens,
        num_sampled=num_tokens,
        is_truncated=torch.arange(num) == 0,
        of_rows=torch.tensor(of_rows),
    )


def choices_of(**keys: object) -> PPOActorConfig:
    return resolve_choices(PPOActorConfig(path="p", **{"adv_norm": False, **keys}))


def test_rows_of_an_answer_share_its_advantage() -> None:
    grpo = choices_of(baseline="group_mean")
    found = advantages_of({"loss_mask": TRAINED}, samples_of([1.0, 0.0], of_rows=(0, 1, 0, 0)), grpo)
    assert torch.equal(found["advantages"], torch.tensor([0.5, -0.5, 0.5, 0.5])[:, None] * TRAINED)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"reward_bias": -0.5, "reward_scaling": 10.0, "reward_clip": 20.0}, [-5.0, 5.0, 20.0, 20.0]),
        ({"reward_bias": -0.5, "reward_scaling": 10.0}, [-5.0, 5.0, 85.0, 35.0]),
        ({"truncated": "zero", "reward_bias": 1.0}, [1.0, 2.0, 10.0, 5.0]),
        ({"overlong_buffer": 2, "max_new_tokens": 3, "overlong_penalty": 2.0}, [-1.0, 0.0, 7.0, 4.0]),
    ],
)
def test_rewards_are_shaped_before_they_are_compared(keys: dict[str, object], expected: list[float]) -> None:
    found = advantages_of({"loss_mask": TRAINED}, samples_of([0.0, 1.0, 9.0, 4.0]), choices_of(**keys))
    assert torch.equal(found["advantages"], torch.tensor(expected)[:, None] * TRAINED)


def test_a_critic_gets_targets_and_a_discount_counts_trained_tokens() -> None:
    batch = {"loss_mask": TRAINED[:2], "values": torch.full((2, 4), 0.5)}
    samples = samples_of([1.0, 0.0], of_rows=(0, 1, 0, 0))
    samples = dataclasses.replace(samples, of_rows=samples.of_rows[:2])
    found = advantages_of(batch, samples, choices_of(baseline="critic", discount=0.5, gae_lambda=1.0))
    returns = torch.tensor([[0, 0.5, 1.0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(found["returns"], returns)
    torch.testing.assert_close(found["advantages"], returns - 0.5 * TRAINED[:2])
    assert torch.equal(found["returns_mask"], TRAINED[:2])
    discounted = advantages_of({"loss_mask": TRAINED[:2]}, samples, choices_of(discount=0.5))
    torch.testing.assert_close(discounted["advantages"], returns)


def test_the_score_lies_on_the_last_trained_token_and_kl_on_all() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0]] * 3)
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), mask, kl, kl_ctl=0.1)
    torch.testing.assert_close(
        rewards, torch.tensor([[0.0, -0.1, 0.8, 0.0], [0.0, -0.1, 0.0, 1.1], [0.0, 0.0, 0.0, 0.0]])
    )


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, torch.linspace(0, 1, 6, dtype=torch.float64)])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_gae_of_long_rows_equals_the_recursion(discount: float, gae_lambda: float | torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, 333, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 333, generator=generator) < 0.8
    carried, next_value = torch.zeros(2, 6, dtype=torch.float64)
    expected = torch.zeros_like(rewards)
    for t in reversed(range(333)):
        delta = rewards[:, t] + discount * next_value - values[:, t]
        carried = torch.where(mask[:, t], delta + discount * gae_lambda * carried, carried)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        expected[:, t] = torch.where(mask[:, t], carried, 0.0)
    found = gae(rewards, values, mask, discount=discount, gae_lambda=gae_lambda)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_no_rows_and_no_tokens() -> None:
    nothing = torch.zeros(0, 0)
    assert gae(nothing, nothing, nothing, discount=1.0, gae_lambda=1.0).shape == (0, 0)
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.long), 1).shape == (0,)


REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.5, 0.9]), torch.tensor([0, 0, 1, 1])
BASELINES = ("none", "group_mean", "leave_one_out", "length_weighted")
SCALES = ("none", "group_std", "batch_std", "group_mean")
rewarded = st.tuples(st.integers(0, 20).map(lambda k: k / 10), st.integers(0, 3), st.integers(0, 4), st.booleans())


@pytest.mark.parametrize("baseline", BASELINES)
@given(rows=st.lists(rewarded, min_size=1, max_size=10), scale=st.sampled_from(SCALES))
def test_advantages_equal_their_definition_on_any_split_over_ranks(
    baseline: str, rows: list[tuple[float, int, int, bool]], scale: str
) -> None:
    def deviation(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5

    expected = []
    for index, (reward, group, _, _) in enumerate(rows):
        peers = [row for row in rows if row[1] == group]
        others = [row[0] for at, row in enumerate(rows) if row[1] == group and at != index]
        mean = sum(row[0] for row in peers) / len(peers)
        tokens = sum(row[2] for row in peers)
        subtracted = {
            "none": 0.0,
            "group_mean": mean,
            "leave_one_out": sum(others) / len(others) if others else reward,
            "length_weighted": sum(row[0] * row[2] for row in peers) / tokens if tokens else 0.0,
        }[baseline]
        divisor = {
            "none": 1.0,
            "group_std": deviation([row[0] for row in peers]) + 1e-6,
            "batch_std": deviation([row[0] for row in rows]) + 1e-6,
            "group_mean": mean or torch.inf,
        }[scale]
        expected.append((reward - subtracted) / divisor)
    rewards, groups, lengths, is_on_rank0 = (torch.tensor(column) for column in zip(*rows))

    def of_rank(rank: int, reduce: Reduce) -> torch.Tensor:
        mine = is_on_rank0 == (rank == 0)
        settings = {"baseline": baseline, "scale": scale, "lengths": lengths[mine], "reduce": reduce}
        return reward_advantages(rewards[mine].double(), groups[mine], 4, **settings)

    on_rank0, on_rank1 = on_two_ranks(of_rank)
    expected_B = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(on_rank0, expected_B[is_on_rank0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(on_rank1, expected_B[~is_on_rank0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES[1:3])
def test_near_constant_groups_and_groups_of_one(baseline: str, scale: str) -> None:
    alone = torch.tensor([0.7])
    for value in (0.1, 1 / 3, 1e8):
        same = torch.full((8,), value)
        assert reward_advantages(same, torch.zeros(8).long(), 1, baseline=baseline, scale=scale).tolist() == [0.0] * 8
    assert reward_advantages(alone, torch.zeros(1).long(), 1, baseline=baseline, scale=scale).tolist() == [0.0]


def test_the_deviation_of_near_constant_rewards_is_not_lost_to_rounding() -> None:
    groups = torch.zeros(8, dtype=torch.long)
    ours = reward_advantages(torch.tensor([0.35] * 7 + [0.95]), groups, 1)
    assert ours.tolist() == pytest.approx([-1 / 7**0.5] * 7 + [7**0.5], rel=1e-5)
    offset = reward_advantages(torch.tensor([1e4] * 7 + [1e4 + 2**-9]), groups, 1)
    assert offset.tolist() == pytest.approx([-1 / 7**0.5] * 7 + [7**0.5], rel=3e-3)  # that of 1e-6 beside 6e-4


def test_unknown_baselines_and_missing_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"baseline must be one of none, .*: got 'mean'"):
        reward_advantages(REWARDS, GROUPS, 2, baseline="mean")
    with pytest.raises(ValueError, match=r"scale must be one of none, .*: got 'std'"):
        reward_advantages(REWARDS, GROUPS, 2, scale="std")
    with pytest.raises(ValueError, match="lengths must be given with baseline length_weighted: got None"):
        reward_advantages(REWARDS, GROUPS, 2, baseline="length_weighted")


@pytest.mark.parametrize(
    "discount, gae_lambda, advantages, returns",
    [
        (1.0, 0.95, [0, 0.551, 0.58, 0, 0.4], [0, 1.051, 0.98, 0, 1]),
        (0.9, 0.8, [0, 0.26816, 0.428, 0, 0.4], [0, 0.76816, 0.828, 0, 1]),
    ],
)
def test_gae_and_returns_of_the_design(
    discount: float, gae_lambda: float, advantages: list[float], returns: list[float]
) -> None:
    """Position 3 is an environment's reply; what it holds plays no part, and time stands still over it."""
    mask = torch.tensor([[0, 1, 1, 0, 1]])
    for poison in (9.0, torch.nan, torch.inf):
        rewards, values = torch.tensor([[0, 0.1, 0, poison, 1]]), torch.tensor([[poison, 0.5, 0.4, poison, 0.6]])
        settings = {"discount": discount, "gae_lambda": gae_lambda}
        assert gae(rewards, values, mask, **settings)[0].tolist() == pytest.approx(advantages, rel=1e-6)
        targets = gae(rewards, values, mask, **settings) + torch.where(mask.bool(), values, 0.0)
        assert targets[0].tolist() == pytest.approx(returns, rel=1e-6)


def test_long_answers_lose_reward_within_the_buffer() -> None:
    penalties = overlong_penalty(torch.tensor([5, 6, 7, 8, 10, 12]), longest=10, buffer=4)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_finite_and_depend_on_no_order_of_completions_or_groups(baseline: str, scale: str) -> None:
    groups, num_tokens = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2]), torch.tensor([3, 8, 0, 1, 5, 2, 7, 4])

    def advantages(rewards: torch.Tensor, groups: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        return reward_advantages(rewards, groups, 3, baseline=baseline, scale=scale, lengths=num_tokens)

    equal = [0.0] * 8, [0.1] * 8, [0.35] * 7 + [0.95], [-1.0] * 8, [1e6, 1e6 + 1] * 4  # or nearly, negative, large
    for rewards in (torch.linspace(0, 1, 8).square(), *map(torch.tensor, equal)):
        found = advantages(rewards, groups, num_tokens)
        assert found.isfinite()[num_tokens > 0].all()
    rewards = torch.linspace(0, 1, 8).square()
    expected = advantages(rewards, groups, num_tokens)
    torch.testing.assert_close(advantages(*(one.roll(1) for one in (rewards, groups, num_tokens))), expected.roll(1))
    torch.testing.assert_close(advantages(rewards, 2 - groups, num_tokens), expected)


def test_rewards_of_turns_come_when_they_were_earned() -> None:
    """In the first row a context earned 4 and a middle turn, that is not trained, 8; the second has none."""
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0]])
    turns = torch.tensor([[0, 4.0, 0, 1, 8, 2, 0], [0, 0, 0, 0, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([5.0, 3.0]), mask, turn_rewards=turns)
    assert rewards.tolist() == [[0, 0, 0, 9, 0, 2 + 5, 0], [0, 0, 3, 0, 0, 0, 0]]
    for dtype in (torch.float64, torch.float16, torch.int64):  # of the workflow's choice
        assert torch.equal(token_rewards(torch.tensor([5.0, 3.0]), mask, turn_rewards=turns.to(dtype)), rewards)
    to_go = gae(rewards, torch.zeros_like(rewards), mask, discount=1.0, gae_lambda=1.0)
    assert to_go[0].tolist() == [0, 0, 16, 16, 0, 7, 0], "the sum without what is over"

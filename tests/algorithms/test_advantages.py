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


def test_two_groups_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.tensor([0, 1, 0, 1])
    normalized = whiten(rewards, groups, 2)
    # group 0: mean 0.5, deviation 0.5; group 1: no deviation
    assert normalized.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-5)
    assert normalized[1].item() == 0.0 and normalized[3].item() == 0.0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8])
def test_equal_rewards_and_groups_of_one_normalise_to_exactly_zero(value: float) -> None:
    assert whiten(torch.full((7,), value), torch.zeros(7, dtype=torch.long), 1).tolist() == [0.0] * 7
    assert whiten(torch.full((3,), value), torch.arange(3), 3).tolist() == [0.0] * 3


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


def test_grpo_by_hand() -> None:
    """Two groups of two samples; the rewards of the second are equal."""
    grpo = choices_of(baseline="group_mean", reward_scale="group_std")
    found = advantages_of({"loss_mask": TRAINED}, samples_of([1.0, 0.0, 0.5, 0.5]), grpo)
    assert found.keys() == {"advantages"}
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None] * TRAINED
    torch.testing.assert_close(found["advantages"], expected, atol=1e-5, rtol=1e-5)


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


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 0.0, 2.0]]), torch.tensor([[9.0, 0.5, 9.0, 1.0]])
    mask = torch.tensor([[0, 1, 0, 1]])
    advantages = gae(rewards, values, mask, discount=0.9, gae_lambda=0.5)
    last = 2.0 - 1.0
    first = 1.0 + 0.9 * 1.0 - 0.5 + 0.9 * 0.5 * last
    torch.testing.assert_close(advantages, torch.tensor([[0.0, first, 0.0, last]]))


@given(
    rows=st.lists(
        st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    discount=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_gae_equals_its_definition(
    rows: list[list[tuple[float, float, bool]]], discount: float, gae_lambda: float
) -> None:
    data = torch.tensor(rows, dtype=torch.float64)
    rewards, values, mask = data.unbind(-1)
    advantages = gae(rewards, values, mask, discount=discount, gae_lambda=gae_lambda)
    for row in range(len(rows)):
        actions = [t for t in range(5) if mask[row, t]]
        deltas = []
        for position, t in enumerate(actions):
            after = values[row, actions[position + 1]].item() if position + 1 < len(actions) else 0.0
            deltas.append(rewards[row, t].item() + discount * after - values[row, t].item())
        expected = [0.0] * 5
        for position, t in enumerate(actions):
            expected[t] = sum((discount * gae_lambda) ** k * d for k, d in enumerate(deltas[position:]))
        assert advantages[row].tolist() == pytest.approx(expected, abs=1e-9)


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


REWARDS, GROUPS = torch.tensor([1.0, 0, 0, 0, 0.5, 0.9], dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1])
LENGTHS = torch.tensor([1, 1, 2, 4, 3, 1])


@pytest.mark.parametrize(
    "baseline, scale, expected",  # the first two of the first group, then the second group
    [
        ("none", "none", [1, 0, 0.5, 0.9]),
        ("group_mean", "group_std", [1.732051, -0.5773503, -1, 1]),
        ("group_mean", "none", [0.75, -0.25, -0.2, 0.2]),
        ("leave_one_out", "none", [1, -0.3333333, -0.4, 0.4]),
        ("group_mean", "batch_std", [1.751623, -0.5838742, -0.4670994, 0.4670994]),
        ("group_mean", "group_mean", [3, -1, -0.2857143, 0.2857143]),
        ("length_weighted", "none", [0.875, -0.125, -0.1, 0.3]),
    ],
)
def test_advantages_of_six_rewards_by_hand(baseline: str, scale: str, expected: list[float]) -> None:
    ours = reward_advantages(REWARDS, GROUPS, 2, baseline=baseline, scale=scale, lengths=LENGTHS)
    assert ours[[0, 1, 4, 5]].tolist() == pytest.approx(expected, rel=6e-6)  # those of 0.2 / (0.2 + 1e-6)


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
    same, alone = torch.full((8,), 0.1), torch.tensor([0.7])
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


def test_reinforce_plus_plus_by_hand() -> None:
    mask = torch.arange(4) < LENGTHS[:, None]
    rewards = token_rewards(REWARDS, mask)
    to_go = gae(rewards, torch.zeros_like(rewards), mask, discount=1.0, gae_lambda=1.0)
    whitened = whiten(to_go[mask], torch.zeros(12, dtype=torch.long), 1)
    ours = torch.zeros_like(rewards).masked_scatter(mask, whitened)
    assert ours[[0, 1, 4, 5], 0].tolist() == pytest.approx([1.96472, -0.7767498, 0.5939852, 1.690573], rel=6e-6)


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


def test_every_row_may_have_its_own_lambda() -> None:
    rewards, values, mask = torch.rand(2, 4), torch.rand(2, 4), torch.ones(2, 4)
    both = gae(rewards, values, mask, discount=0.9, gae_lambda=torch.tensor([0.3, 0.8]))
    for row, gae_lambda in enumerate((0.3, 0.8)):
        one = gae(rewards[[row]], values[[row]], mask[[row]], discount=0.9, gae_lambda=gae_lambda)
        torch.testing.assert_close(both[row], one[0])


def test_long_answers_lose_reward_within_the_buffer() -> None:
    penalties = overlong_penalty(torch.tensor([5, 6, 7, 8, 10, 12]), longest=10, buffer=4)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out", "length_weighted"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "group_mean"])
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

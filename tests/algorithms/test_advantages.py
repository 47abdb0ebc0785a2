import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algorithms.advantages import gae, scale_rewards, token_rewards, whiten


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
    meeting, shares = threading.Barrier(2, timeout=30), {}

    def run(rank: int) -> torch.Tensor:
        def sum_over_ranks(local: torch.Tensor) -> torch.Tensor:
            shares[rank] = local
            meeting.wait()
            total = shares[0] + shares[1]
            meeting.wait()
            return total

        mine = is_on_rank0 == (rank == 0)
        return whiten(values[mine], groups[mine], 4, reduce=sum_over_ranks)

    with ThreadPoolExecutor(2) as threads:
        on_rank0, on_rank1 = threads.map(run, range(2))
    torch.testing.assert_close(on_rank0, whole[is_on_rank0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(on_rank1, whole[~is_on_rank0], atol=1e-6, rtol=1e-5)


def test_rewards_are_biased_scaled_and_clipped() -> None:
    rewards = torch.tensor([0.0, 1.0, 9.0])
    assert scale_rewards(rewards, scaling=10.0, bias=-0.5, clip=20.0).tolist() == [-5.0, 5.0, 20.0]
    assert scale_rewards(rewards, scaling=10.0, bias=-0.5).tolist() == [-5.0, 5.0, 85.0]


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


def test_no_rows_and_no_tokens() -> None:
    nothing = torch.zeros(0, 0)
    assert gae(nothing, nothing, nothing, discount=1.0, gae_lambda=1.0).shape == (0, 0)
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.long), 1).shape == (0,)

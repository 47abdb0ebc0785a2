import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algorithms.preferences import bradley_terry, completion_log_ratios, dpo, ipo, last_tokens


def test_dpo_by_hand() -> None:
    log_ratios = torch.tensor([0.4, -0.2, 1.0, 1.0], dtype=torch.float64).requires_grad_()
    losses, statistics = dpo(log_ratios, beta=0.1)
    assert losses.tolist() == pytest.approx([0.6635971, math.log(2)], abs=1e-7)  # at the reference: log 2
    losses[0].backward()
    slope = 0.1 / (1 + math.exp(0.06))
    assert log_ratios.grad is not None and log_ratios.grad.tolist() == pytest.approx([-slope, slope, 0, 0])
    assert statistics["margin"].tolist() == pytest.approx([0.06, 0.0])
    assert statistics["chosen_reward"].tolist() == pytest.approx([0.04, 0.1])
    assert statistics["accuracy"].tolist() == [True, False]


def test_ipo_by_hand() -> None:
    losses, _ = ipo(torch.tensor([0.4, -0.2, 5.0, 0.0]), tau=0.1)
    assert losses.tolist() == pytest.approx([(0.6 - 5) ** 2, 0.0], rel=1e-6)


def test_bradley_terry_by_hand() -> None:
    losses, statistics = bradley_terry(torch.tensor([1.3, 0.4], dtype=torch.float64))
    assert losses.tolist() == pytest.approx([0.3411539], abs=1e-7)
    assert statistics["accuracy"].tolist() == [True] and statistics["margin"].tolist() == pytest.approx([0.9])
    losses, _ = bradley_terry(torch.tensor([1.3, 0.4], dtype=torch.float64), center=0.01)
    assert losses.item() == pytest.approx(0.3411539 + 0.01 * 1.7**2, abs=1e-7)


@pytest.mark.parametrize("loss", [lambda x: dpo(x, beta=0.1), lambda x: bradley_terry(x)])
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_extreme_pairs_stay_finite(loss: object, gap: float) -> None:
    values = torch.tensor([gap, 0.0]).requires_grad_()
    losses, _ = loss(values)  # type: ignore[operator]
    losses.sum().backward()
    assert losses.isfinite().all() and values.grad is not None and values.grad.isfinite().all()


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="rows must come in pairs: got 3 rows"):
        bradley_terry(torch.zeros(3))


@given(rows=st.lists(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=4), max_size=4))
def test_log_ratios_of_answers_equal_their_definition(rows: list[list[tuple[float, bool]]]) -> None:
    """Prompts hold NaN; sums for DPO, means over the trained tokens for IPO."""
    tokens = [(x, trained, row) for row, answer in enumerate(rows) for x, trained in answer]
    log_ratios = torch.tensor([x for x, _, _ in tokens], dtype=torch.float64)
    mask = torch.tensor([trained for _, trained, _ in tokens], dtype=torch.bool)
    batch = {"ref_logprobs": torch.where(mask, -1.0, math.nan), "loss_mask": mask}
    batch["segment_ids"] = torch.tensor([row for _, _, row in tokens], dtype=torch.long)
    batch["cu_seqlens"] = torch.tensor([0, *map(len, rows)]).cumsum(0)
    kept = [[x for x, trained in row if trained] for row in rows]
    sums = completion_log_ratios(log_ratios - 1.0, batch)
    assert sums.tolist() == pytest.approx([sum(one) for one in kept], abs=1e-12)
    means = completion_log_ratios(log_ratios - 1.0, batch, per_token=True)
    assert means.tolist() == pytest.approx([sum(one) / max(len(one), 1) for one in kept], abs=1e-12)


def test_scores_are_read_at_the_last_token_of_each_row_whatever_its_id() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    cu_seqlens = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    assert last_tokens(scores, cu_seqlens).tolist() == [2.0, 3.0, 6.0]

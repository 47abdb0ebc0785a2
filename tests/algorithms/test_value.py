import math

import pytest
import torch

from arealite.algorithms.objectives import critic_loss


def four_tokens() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = {"values": torch.tensor([0.5, 0.4, 0.5, 0.5]), "returns": torch.tensor([0.9, 0.0, 1.0, 0.2])}
    return torch.tensor([1.0, 0.1, 0.5, 1.0]), batch | {"loss_mask": torch.ones(4, dtype=torch.bool)}


def test_four_tokens_by_hand() -> None:
    values, batch = four_tokens()
    values.requires_grad_()
    losses, statistics = critic_loss(values, batch, eps_clip=0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.02, 0.02, 0.125, 0.32])
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.0, 0.0, -0.5, 0.8])
    assert statistics["clip_ratio"].tolist() == [True, True, False, False]


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values, batch = four_tokens()
    losses, statistics = critic_loss(values, batch)
    assert losses.tolist() == pytest.approx([0.005, 0.005, 0.125, 0.32])
    assert not statistics["clip_ratio"].any()


@pytest.mark.parametrize("eps_clip", [None, 0.2])
def test_masked_tokens_play_no_part_whatever_they_hold(eps_clip: float | None) -> None:
    values, batch = four_tokens()
    expected = critic_loss(values, batch, eps_clip=eps_clip)[0]
    for poison in (math.nan, math.inf, -math.inf):
        batch["loss_mask"] = torch.tensor([True, False, True, True])
        for column in (values, batch["values"], batch["returns"]):
            column[1] = poison
        poisoned = values.clone().requires_grad_()
        losses, statistics = critic_loss(poisoned, batch, eps_clip=eps_clip)
        losses.sum().backward()
        assert losses[[0, 2, 3]].equal(expected[[0, 2, 3]]) and losses[1] == 0
        assert poisoned.grad is not None and poisoned.grad[1] == 0 and poisoned.grad.isfinite().all()
        assert statistics["value"].isfinite().all()

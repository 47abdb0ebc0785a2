"""Losses of the Tinker API: their values and gradients are those of the formulas in its documentation."""

import math

import pytest
import torch

from arealite.tinker.losses import inputs_of, token_losses

LOGPROBS, SAMPLED, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [2.0, -1.0, 0.5]
RATIOS = [math.exp(0.5), math.exp(-1.0), 1.0]
BY_HAND: dict[str, tuple[list[float], list[float]]] = {  # losses and their derivatives by the logprobs
    "cross_entropy": ([0.5, 2.0, -1.0], [-0.5, -1.0, 2.0]),
    "importance_sampling": ([-2 * RATIOS[0], RATIOS[1], -0.5], [-2 * RATIOS[0], RATIOS[1], -0.5]),
    "ppo": ([-2 * 1.2, 0.8, -0.5], [0.0, 0.0, -0.5]),  # min(r A, clip(r) A): both are clipped
    "cispo": ([2 * 1.2, -0.8 * 2, 0.25], [-2 * 1.2, 0.8, -0.5]),
    "dro": ([2 + 0.025 * 0.25, -2 + 0.025, 0.25], [-2 + 0.05 * 0.5, 1 - 0.05, -0.5]),
}


@pytest.mark.parametrize("loss", BY_HAND)
def test_losses_by_hand(loss: str) -> None:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    columns = {"weights": [0.5, 1.0, -2.0], "logprobs": SAMPLED, "advantages": ADVANTAGES}
    inputs = {name: torch.tensor(columns[name], dtype=torch.float64) for name in inputs_of(loss, {})}
    losses = token_losses(loss, logprobs, inputs, {})
    losses.sum().backward()
    values, derivatives = BY_HAND[loss]
    assert losses.tolist() == pytest.approx(values, abs=1e-12)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(derivatives, abs=1e-12)


def test_the_config_of_a_loss() -> None:
    logprobs, inputs = torch.tensor([0.0]), {"logprobs": torch.tensor([-1.0]), "advantages": torch.tensor([1.0])}
    wide = token_losses("ppo", logprobs, inputs, {"clip_high_threshold": 2.0})
    assert wide.tolist() == [-2.0]
    with pytest.raises(
        ValueError, match=r"loss_fn_config of ppo must have clip_low_threshold, .*: got beta. Remove it."
    ):
        inputs_of("ppo", {"beta": 1.0})
    with pytest.raises(ValueError, match=r"loss_fn must be cross_entropy, .*: got gspo. Use one of them, or forward_"):
        inputs_of("gspo", {})

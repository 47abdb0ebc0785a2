import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algorithms import objectives
from arealite.algorithms.ratios import kl_estimates, kl_losses, masked_log_ratio

LOGITS = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
REF = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
KL, GRADIENT = 0.3034338, [0.3836085, -0.2368286, -0.14678]
TRAINED = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize("estimator, expected", [("k1", KL), ("k2", 0.3535871), ("k3", KL)])
def test_expected_estimates_of_three_tokens(estimator: str, expected: float) -> None:
    logprobs = LOGITS.log_softmax(0)
    estimates = kl_estimates(logprobs - REF, estimator)
    assert (logprobs.exp() * estimates).sum().item() == pytest.approx(expected, abs=1e-7)


def expected_gradient(estimator: str, sampled_from: torch.Tensor) -> torch.Tensor:
    """Gradient by the logits of the penalty, in expectation over tokens sampled from other logits."""
    logits = LOGITS.clone().requires_grad_()
    sampler = sampled_from.log_softmax(0)
    batch = {"ref_logprobs": REF, "proximal_logprobs": sampler, "loss_mask": TRAINED}
    (sampler.exp() * kl_losses(logits.log_softmax(0), batch, estimator=estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_expected_gradients_are_that_of_the_divergence() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.exp() * (logprobs - REF)).sum().backward()
    assert logits.grad is not None and logits.grad.tolist() == pytest.approx(GRADIENT, abs=1e-6)
    assert expected_gradient("k2", LOGITS).tolist() == pytest.approx(GRADIENT, abs=1e-6)
    assert expected_gradient("k3", LOGITS).tolist() == pytest.approx(GRADIENT, abs=1e-6)
    elsewhere = torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64)  # sampled before the weights moved
    assert expected_gradient("k3", elsewhere).tolist() == pytest.approx(GRADIENT, abs=1e-6)


def test_k1_is_no_loss() -> None:
    with pytest.raises(ValueError, match="the estimator of a KL loss must be one of k2, k3: got 'k1'"):
        kl_losses(LOGITS, {}, estimator="k1")


def test_distillation_by_any_objective_has_the_gradient_of_the_divergence_to_the_teacher() -> None:
    for objective in (objectives.reinforce, lambda x, b: objectives.ppo(x, b, eps_clip=0.2, eps_clip_higher=0.2)):
        logits = LOGITS.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        student = logprobs.detach()
        batch = {"proximal_logprobs": student, "loss_mask": TRAINED, "segment_ids": torch.arange(3)}
        batch["advantages"] = masked_log_ratio(REF, student, TRAINED)
        (student.exp() * objective(logprobs, batch)[0]).sum().backward()
        assert logits.grad is not None and logits.grad.tolist() == pytest.approx(GRADIENT, abs=1e-6)


def test_distillation_from_oneself_and_of_masked_tokens_is_exactly_zero() -> None:
    logprobs, mask = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[True, True, False]])
    assert masked_log_ratio(logprobs, logprobs, mask).tolist() == [[0.0] * 3]
    assert masked_log_ratio(logprobs + 0.5, logprobs, mask).tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(
    tokens=st.lists(
        st.tuples(st.sampled_from([-0.1, -3.0, -100.0]), st.sampled_from([-0.2, -100.0, -math.inf]), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_penalties_are_finite_in_float32_and_zero_where_masked(
    estimator: str, tokens: list[tuple[float, float, bool]]
) -> None:
    logprobs, ref, mask = (torch.tensor(column) for column in zip(*tokens))
    logprobs = torch.where(mask, logprobs, math.nan).requires_grad_()
    batch = {"ref_logprobs": ref, "proximal_logprobs": ref.roll(1), "loss_mask": mask}
    losses = kl_losses(logprobs, batch, estimator=estimator)
    losses.sum().backward()
    assert losses.isfinite().all() and (losses >= 0).all() and (losses[~mask] == 0).all()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all() and (logprobs.grad[~mask] == 0).all()

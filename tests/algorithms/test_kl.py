import pytest
import torch

from arealite.algorithms.kl import k3


def test_k3_is_the_divergence_in_expectation_and_never_negative() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    estimates = k3((p / q).log())
    assert (estimates >= 0).all()
    assert (p * estimates).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)

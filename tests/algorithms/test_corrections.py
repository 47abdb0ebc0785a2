import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algorithms.corrections import correction_factors, drifted_completions

NAN, INF = math.nan, math.inf
MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 0, 1]]).bool()
WEIGHTS = torch.tensor([[NAN, 1, 2.5, INF, 0], [INF, 0.8, 1, NAN, 0.4]], dtype=torch.float64)
RATIOS = torch.tensor([[1, 1.1, 1.5, 1, 1], [1, 0.7, 1, 1, 4]], dtype=torch.float64)
PROXIMAL = torch.tensor([[NAN, -1, -0.5, INF, 0], [-INF, -2, -0.2, 0, -2.2]], dtype=torch.float64)
ROLLOUT = PROXIMAL - WEIGHTS.log()
PPO_LOSSES = torch.tensor([[0, -1.1, -1.2, 0, 0], [0, 0.8, 1, 0, 4]], dtype=torch.float64)
"""The five tokens of the design, with prompts and an environment's reply between them that hold anything."""


@pytest.mark.parametrize(
    "settings, factors, token_mean, sequence_mean",
    [
        ({}, [1, 2.5, 0.8, 1, 0.4], -0.172, -0.485),
        ({"upper": 2.0}, [1, 2, 0.8, 1, 0.4], -0.052, -0.335),
        ({"action": "mask", "upper": 2.0}, [1, 0, 0.8, 1, 0.4], 0.428, 0.265),
        ({"action": "mask", "lower": 0.5, "upper": 2.0}, [1, 0, 0.8, 1, 0], 0.108, -0.001666667),
        ({"level": "sequence", "upper": 2.0}, [2, 2, 0.32, 0.32, 0.32], -0.5488, -0.8406667),
        ({"level": "sequence", "action": "mask", "upper": 2.0}, [0, 0, 0.32, 0.32, 0.32], 0.3712, 0.3093333),
        ({"level": "geometric", "action": "mask", "lower": 0.6, "upper": 1.5}, [0, 0, 0.8, 1, 0.4], 0.648, 0.54),
        ({"level": "geometric", "lower": 0.7, "upper": 1.5}, [1.5, 1.5, 0.7, 0.7, 0.7], None, None),
        ({"action": "mask", "metric": "k1", "lower": -0.5, "upper": 0.5}, [1, 0, 0.8, 1, 0], None, None),
        ({"action": "mask", "metric": "k2", "upper": 0.4}, [1, 0, 0.8, 1, 0], None, None),
        ({"action": "mask", "metric": "k3", "upper": 0.5}, [1, 0, 0.8, 1, 0.4], None, None),  # 0, 0.58, ..., 0.32
        ({"action": "mask", "metric": "k2", "upper": 0.43, "level": "sequence"}, [2.5, 2.5, 0, 0, 0], None, None),
        ({"action": "mask", "metric": "k2", "upper": 0.2, "level": "geometric"}, [0, 0, 0.8, 1, 0.4], None, None),
        ({"level": "geometric", "action": "mask", "upper": 5.0}, [1, 2, 0.8, 1, 0.4], -0.052, -0.335),  # as truncated
    ],
)
def test_five_tokens_by_hand(
    settings: dict[str, Any], factors: list[float], token_mean: float | None, sequence_mean: float | None
) -> None:
    ours = correction_factors(PROXIMAL, ROLLOUT, MASK, **settings)
    assert ours[MASK].tolist() == pytest.approx(factors)
    assert (ours[~MASK] == 0).all()
    if token_mean is not None:
        assert (ours * PPO_LOSSES).sum().item() / 5 == pytest.approx(token_mean)
        means = (ours * PPO_LOSSES).sum(dim=1) / MASK.sum(dim=1)
        assert means.mean().item() == pytest.approx(sequence_mean)


settings = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["token", "sequence", "geometric"]),
        "lower": st.sampled_from([None, 0.5, 0.9]),
        "upper": st.sampled_from([None, 1.1, 2.0]),
    }
) | st.fixed_dictionaries(
    {
        "level": st.sampled_from(["token", "sequence", "geometric"]),
        "action": st.just("mask"),
        "metric": st.sampled_from(["ratio", "k1", "k2", "k3"]),
        "lower": st.sampled_from([None, 0.3]),
        "upper": st.sampled_from([None, 0.7, 2.0]),
    }
)


def reference_factors(log_weights: list[float], settings: dict[str, Any]) -> list[float]:
    """Factors of the trained tokens of one answer, by loops."""
    level, metric, n = settings["level"], settings.get("metric", "ratio"), len(log_weights)
    lower = -INF if settings["lower"] is None else settings["lower"]
    upper = INF if settings["upper"] is None else settings["upper"]
    estimates = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    factors = []
    for x in log_weights:
        over = {"token": [x], "sequence": log_weights, "geometric": log_weights}[level]
        divisor = n if level == "geometric" else 1
        weight = math.exp(sum(over) / divisor)
        if settings.get("action") != "mask":
            factors.append(min(max(weight, lower), upper))
            continue
        bounded = weight if metric == "ratio" else sum(estimates[metric](one) for one in over) / divisor
        factor = min(math.exp(x), 2.0) if level == "geometric" else weight
        factors.append(factor if lower <= bounded <= upper else 0.0)
    return factors


@given(
    answers=st.lists(
        st.lists(st.integers(-40, 40).map(lambda k: 0.037 * k + 0.001), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    settings=settings,
)
def test_factors_equal_the_slow_reference(answers: list[list[float]], settings: dict[str, Any]) -> None:
    """Which sees one answer at a time: rows, their order and their padding do not matter."""
    rollout = torch.full((len(answers), 6), NAN, dtype=torch.float64)
    mask = torch.zeros(len(answers), 6, dtype=torch.bool)
    for row, log_weights in enumerate(answers):
        mask[row, 1 : 1 + len(log_weights)] = True
        rollout[row, 1 : 1 + len(log_weights)] = -1.0 - torch.tensor(log_weights, dtype=torch.float64)
    factors = correction_factors(torch.full_like(rollout, -1.0), rollout, mask, **settings)
    for row, log_weights in enumerate(answers):
        assert factors[row][mask[row]].tolist() == pytest.approx(reference_factors(log_weights, settings), rel=1e-9)


@pytest.mark.parametrize("gap", [20.0, 100.0, INF])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_a_weight_without_bound_leaves_the_sum(gap: float, level: str, action: str) -> None:
    proximal, rollout = torch.zeros(1, 1), torch.full((1, 1), -gap)
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert correction_factors(proximal, rollout, mask, level=level, action=action).item() == 0.0
    expected = 5.0 if action == "truncate" else 0.0
    assert correction_factors(proximal, rollout, mask, level=level, action=action, upper=5.0).item() == expected
    reverse = correction_factors(rollout, proximal, mask, level=level, action=action).item()
    assert reverse == pytest.approx(math.exp(-20))


@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_factors_carry_no_gradient(action: str) -> None:
    """Also where the proximal policy is the current one."""
    assert not correction_factors(PROXIMAL.clone().requires_grad_(), ROLLOUT, MASK, action=action).requires_grad


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the metric of action truncate must be one of ratio: got 'k2'"):
        correction_factors(PROXIMAL, ROLLOUT, MASK, metric="k2")
    for setting in ("level", "action", "metric"):
        with pytest.raises(ValueError, match=f"{'estimator' if setting == 'metric' else setting} must be one of"):
            correction_factors(PROXIMAL, ROLLOUT, MASK, **({"action": "mask"} | {setting: "other"}))


def test_answers_that_drifted_away_by_hand() -> None:
    logprobs = PROXIMAL + RATIOS.log()
    advantages = torch.tensor([[NAN, 1, 1, 0, 0], [0, -1, -1, NAN, -1]])
    assert drifted_completions(logprobs, ROLLOUT, advantages, MASK, delta=0.03).tolist() == [False, True]
    assert drifted_completions(logprobs, ROLLOUT, advantages, MASK, delta=0.036604).tolist() == [False, True]
    assert drifted_completions(logprobs, ROLLOUT, advantages, MASK, delta=0.036606).tolist() == [False, False]
    assert drifted_completions(logprobs, ROLLOUT, -advantages, MASK, delta=-9.0).tolist() == [True, False]
    assert drifted_completions(logprobs, ROLLOUT, advantages, MASK & False, delta=-9.0).tolist() == [False, False]

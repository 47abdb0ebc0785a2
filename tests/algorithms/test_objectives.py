import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Answer, Token
from tensordict import TensorDict

from arealite.algorithms import objectives, properties

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"eps_clip": 0.2, "eps_clip_higher": 0.2}),
    "clip_higher": ("ppo", {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 3.0}),
    "gspo": ("ppo", {"eps_clip": 3e-4, "eps_clip_higher": 4e-4, "level": "sequence"}),
    "gspo_wide": ("ppo", {"eps_clip": 0.5, "eps_clip_higher": 0.5, "level": "sequence"}),
    "gmpo": ("gmpo", {"eps_log": 0.4}),
    "cispo": ("cispo", {"cispo_max": 5.0}),
    "sapo": ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "reinforce": ("reinforce", {}),
    "dppo": ("dppo", {"delta": 0.2}),
}
every_objective = pytest.mark.parametrize("case", [case for case in CASES if case != "gspo"])
Objective = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def objective_of(case: str) -> Objective:
    name, settings = CASES[case]
    return partial(getattr(objectives, name), **settings)


def token(log_ratio: float, log_weight: float, advantage: float, proximal: float = -1.0) -> Token:
    logprob = proximal + log_ratio
    return Token(logprob, logprob, proximal, proximal - log_weight, advantage)


def five_tokens() -> list[Answer]:
    """The table of the design: an answer of two tokens with advantage 1, one of three with advantage -1."""
    columns = zip((1.1, 1.5, 0.7, 1, 4), (1, 2.5, 0.8, 1, 0.4), (1, 1, -1, -1, -1), (-1, -0.5, -2, -0.2, -2.2))
    tokens = [token(math.log(r), math.log(w), advantage, proximal) for r, w, advantage, proximal in columns]
    return [tokens[:2], tokens[2:]]


def test_statistics_by_hand() -> None:
    logprobs, batch = reference.packed(five_tokens())
    statistics = objectives.ppo(logprobs, batch, eps_clip=0.2, eps_clip_higher=0.2, c_clip=3.0)[1]
    assert statistics["ratio"].tolist() == pytest.approx([1.1, 1.5, 0.7, 1, 4])
    assert statistics["approx_kl"].tolist() == pytest.approx([r - 1 - math.log(r) for r in (1.1, 1.5, 0.7, 1, 4)])
    assert statistics["clip_ratio_high"].tolist() == [False, True, False, False, False]
    assert statistics["clip_ratio_low"].tolist() == [False, False, True, False, False]
    assert statistics["clip_ratio"].tolist() == [False, True, True, False, False]
    assert statistics["dual_clip_ratio"].tolist() == [False, False, False, False, True]
    statistics = objective_of("gspo")(logprobs, batch)[1]
    assert statistics["ratio"].tolist() == pytest.approx([1.284523] * 2 + [1.40946] * 3, rel=1e-6)
    assert statistics["clip_ratio"].tolist() == [True, True, False, False, False]
    statistics = objective_of("gmpo")(logprobs, batch)[1]
    assert statistics["clip_ratio_high"].tolist() == [False, True, False, False, False]
    assert not statistics["clip_ratio_low"].any()
    statistics = objectives.cispo(logprobs, batch, cispo_max=3.9)[1]
    assert statistics["clip_ratio"].tolist() == [False, False, False, False, True]
    statistics = objectives.dppo(logprobs, batch, delta=0.2)[1]
    assert statistics["clip_ratio"].tolist() == [False, True, False, False, False]  # t1: from 0.24 to 0.91


@pytest.mark.parametrize("log_ratio, weight", [(math.log(4), 4.0), (math.log(0.01), 0.01), (math.log(6), 5.0)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_has_one_bound_and_it_is_a_ratio(log_ratio: float, weight: float, advantage: float) -> None:
    logprobs, batch = reference.packed([[token(log_ratio, 0.0, advantage)]])
    objectives.cispo(logprobs, batch, cispo_max=5.0)[0].sum().backward()
    assert logprobs.grad.item() == pytest.approx(-weight * advantage)


# A grid whose values, and whose means over up to four tokens, stay clear of every bound, where gradients jump.
log_ratios = st.integers(-40, 40).map(lambda k: 0.0371 * k + 0.00117)
tokens_of_an_answer = st.lists(st.tuples(log_ratios, log_ratios, st.integers(-30, -1)), min_size=1, max_size=4)
answers = st.lists(
    st.tuples(tokens_of_an_answer, st.sampled_from([-1.7, -0.3, 0.0, 0.4, 2.0])), min_size=1, max_size=4
).map(lambda rows: [[token(x, w, advantage, p / 10) for x, w, p in row] for row, advantage in rows])


@every_objective
@settings(max_examples=settings.default.max_examples // 2)
@given(answers=answers)
def test_losses_and_gradients_equal_the_slow_reference(case: str, answers: list[Answer]) -> None:
    name, choices = CASES[case]
    losses, gradient = reference.losses_and_gradients(getattr(reference, name), answers, choices)
    logprobs, batch = reference.packed(answers)
    ours, statistics = objective_of(case)(logprobs, batch)
    assert ours.tolist() == pytest.approx(losses, rel=1e-9, abs=1e-12)
    (ours * torch.arange(1, len(losses) + 1)).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-6)
    assert not any(value.requires_grad for value in statistics.values())
    assert {value.shape for value in statistics.values()} == {logprobs.shape}


def padded(answers: list[Answer], seed: int) -> TensorDict:
    """Return rows `[B, T]` with prompts, replies of an environment and padding around the answers."""
    rows = properties.random_rows(seed, [len(answer) for answer in answers])
    logprobs, batch = reference.packed(answers)
    for name in ("proximal_logprobs", "rollout_logprobs", "advantages"):
        rows[name][rows["loss_mask"]] = batch[name]
    rows["logprobs"][rows["loss_mask"]] = logprobs.detach()
    return rows


@every_objective
@settings(max_examples=settings.default.max_examples // 10)
@given(answers=answers, seed=st.integers(0, 2**31))
def test_the_properties_that_a_loss_of_the_user_must_have(case: str, answers: list[Answer], seed: int) -> None:
    objective, rows = objective_of(case), padded(answers, seed)
    for check in (properties.check_form, properties.check_split, properties.check_masked, properties.check_finite):
        check(objective, rows)
    properties.check_sign(objective, properties.random_rows(0, (3, 1, 0, 2, 2)))
    found = properties.evaluate(objective, rows)
    expected = objective(*reference.packed(answers))[0].detach()
    torch.testing.assert_close(found["losses"][rows["loss_mask"]], expected, rtol=1e-9, atol=1e-12)
    assert (found["losses"][~rows["loss_mask"]] == 0).all()


@every_objective
@pytest.mark.parametrize("gap", [21.0, 9998.0, math.inf])
@pytest.mark.parametrize("far", ["logprobs", "proximal_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_extreme_token_leaves_loss_and_gradient_finite(case: str, far: str, gap: float, advantage: float) -> None:
    """In float32, in an answer of its own and in one with another token; the gradients of other answers stay."""
    plain, batch = reference.packed([*five_tokens(), [token(0.1, 0.1, advantage)], [token(0.1, 0.1, advantage)]])
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    batch["segment_ids"] = torch.tensor([0, 0, 1, 1, 1, 2, 1])
    batch["advantages"][6] = -1.0
    gradients = []
    for reach in (0.0, gap):
        columns = batch | {"logprobs": plain.detach().float()}
        columns[far] = columns[far].clone()
        columns[far][5:] -= reach if far != "logprobs" else min(reach, 1e6)  # logits are finite
        logprobs = columns.pop("logprobs").requires_grad_()
        losses, statistics = objective_of(case)(logprobs, columns)
        assert losses.isfinite().all() and all(value.isfinite().all() for value in statistics.values())
        losses.sum().backward()
        assert logprobs.grad.isfinite().all()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[1][:2], gradients[0][:2])


def test_ratios_are_bounded_by_the_exponential_of_20() -> None:
    logprobs, batch = reference.packed([[token(98.0, 0.0, -1.0, -99.0)]])
    losses, statistics = objectives.ppo(logprobs, batch, eps_clip=0.2, eps_clip_higher=0.2)
    assert losses.item() == statistics["ratio"].item() == pytest.approx(math.exp(20))


@every_objective
def test_no_tokens_and_no_trained_tokens(case: str) -> None:
    logprobs, batch = reference.packed(five_tokens())
    batch["loss_mask"] = torch.zeros(5, dtype=torch.bool)
    assert objective_of(case)(logprobs, batch)[0].tolist() == [0.0] * 5
    assert objective_of(case)(*reference.packed([]))[0].shape == (0,)

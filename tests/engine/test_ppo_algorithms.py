"""Every algorithm through the engine: no split, order or rank changes it, and it is what plain autograd says."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from training_cases import (
    OPTIMIZER,
    actor_config,
    full_params,
    gradient_norm,
    of_update,
    plain_logprobs,
    trajectory_batch,
)
from transformers import AutoModelForCausalLM

from arealite.algorithms.logprobs import trained_tokens
from arealite.algorithms.objectives import token_losses, token_weights
from arealite.api.cli_args import CorrectionConfig, MicroBatchSpec, OptimizerConfig
from arealite.api.config.algorithm import PRESETS, resolve_choices
from arealite.api.errors import ConfigError
from arealite.engine.ppo.actor import FSDPPPOActor

LENGTHS = [9, 4, 12, 3, 7, 11, 8, 8]
WITHOUT_CRITIC = sorted(name for name, choices in PRESETS.items() if choices["baseline"] not in ("critic", "teacher"))
Make = Callable[..., FSDPPPOActor]


@pytest.fixture
def make(start: Callable[..., Any], lm_path: str) -> Make:
    def make_actor(functions: dict[str, object] | None = None, **changes: object) -> FSDPPPOActor:
        # With so large an eps AdamW does not magnify the rounding of tiny gradients.
        optimizer = OptimizerConfig(**OPTIMIZER | {"eps": 1e-2})
        values = {"ppo_n_minibatches": 1, "group_size": 2, "max_new_tokens": 10, "optimizer": optimizer} | changes
        return start(FSDPPPOActor(actor_config(lm_path, **values), **(functions or {})))

    return make_actor


def a_batch() -> TensorDict:
    """Two-row groups with rewards that are no two alike, cut-off answers and a reference."""
    batch = trajectory_batch(LENGTHS, 2)
    batch["ref_logprobs"] = (batch["logprobs"] + 0.3 * torch.sin(torch.arange(12.0))) * batch["loss_mask"]
    batch["no_eos"] = torch.tensor([False] * 7 + [True])
    return batch


def update(actor: FSDPPPOActor, batch: TensorDict) -> tuple[dict[str, float], list[torch.Tensor]]:
    if actor.config.proximal == "recompute":
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    return metrics, list(full_params(actor).values())


def assert_same(first: tuple[dict[str, float], list[torch.Tensor]], other: tuple[dict, list[torch.Tensor]]) -> None:
    assert of_update(first[0]) == pytest.approx(of_update(other[0]), rel=2e-4, abs=2e-5)
    for one, two in zip(first[1], other[1], strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


SPLIT = {
    **{name: {"algorithm": name, "kl_ctl": 0.1} for name in WITHOUT_CRITIC},
    "minibatches": {"ppo_n_minibatches": 3},
    "entropy": {"entropy_ctl": 0.1, "aggregation": "sequence_mean"},
    "prompt_mean": {"aggregation": "prompt_mean", "baseline": "length_weighted", "adv_norm": False},
    "sequence correction": {
        "proximal": "recompute",
        "correction": {"action": "mask", "level": "sequence", "upper": 1e9},
        "truncated": "mask",
    },
    "current": {"proximal": "current", "correction": {"action": "truncate", "level": "sequence", "upper": 5.0}},
    "drift": {
        "proximal": "recompute",
        "sequence_mask_delta": 0.1,
        "baseline": "group_mean",
    },
}


@pytest.mark.parametrize("name", SPLIT)
def test_neither_split_nor_order_of_rows_changes_an_update(make: Make, name: str) -> None:
    choices = SPLIT[name]
    if "correction" in choices:
        choices = choices | {"correction": CorrectionConfig(**choices["correction"])}
    batch = a_batch()
    whole = update(make(**choices), batch.clone())
    order = torch.tensor([5, 0, 3, 7, 1, 6, 2, 4])
    split = update(make(**choices, mb_spec=MicroBatchSpec(max_tokens_per_mb=15)), batch[order])
    assert whole[0]["optim/skipped_steps"] == 0.0 and whole[0]["optim/grad_norm"] > 1e-4
    assert_same(whole, split)


def test_a_row_without_tokens_changes_nothing_wherever_it_lies(make: Make) -> None:
    """Alone in a micro-batch, too: then the others are not made larger."""
    batch = a_batch()
    for key in ("attention_mask", "loss_mask"):
        batch[key][3] = 0
    whole, split = (update(make(algorithm="rloo", mb_spec=MicroBatchSpec(n_mbs=n)), batch.clone()) for n in (1, 8))
    assert_same(whole, split)


@pytest.mark.parametrize("name", [name for name in WITHOUT_CRITIC if name != "dppo"])
def test_where_the_policy_has_not_moved_the_gradient_is_that_of_reinforce(make: Make, lm_path: str, name: str) -> None:
    """Whatever the objective clips or pools: -c A by logp, with A of its baseline and c of its aggregation."""
    actor, batch = make(algorithm=name), a_batch()
    batch["logprobs"] = actor.compute_logprobs(batch) * batch["loss_mask"]
    metrics, _ = update(actor, batch)
    mask = trained_tokens(batch["attention_mask"], batch["loss_mask"])
    choices = actor.config
    weights = token_weights(
        mask, batch["group_index"], 4, aggregation=choices.aggregation, loss_constant=choices.loss_constant
    )
    model = AutoModelForCausalLM.from_pretrained(lm_path, dtype=torch.float32)
    (-weights * batch["advantages"] * plain_logprobs(model, batch)).sum().backward()
    norm = gradient_norm(model)
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-3) and norm > 1e-4


def test_one_token_that_is_far_off_skips_no_step(make: Make) -> None:
    """Beyond 88 the ratio would be infinite in float32, and a clipped token would still make the gradient NaN."""
    for far in (-100.0, 100.0):
        actor, batch = make(proximal="recompute", correction=CorrectionConfig(action="mask"), adv_norm=False), a_batch()
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        batch["proximal_logprobs"][2, 5] += far
        actor.compute_advantages(batch)
        metrics = actor.ppo_update(batch)
        assert metrics["optim/skipped_steps"] == 0.0 and math.isfinite(metrics["optim/grad_norm"])


@pytest.mark.parametrize("proximal", ["recompute", "current"])
def test_metrics_are_finite_however_far_the_server_is(make: Make, proximal: str) -> None:
    actor, batch = make(proximal=proximal), a_batch()
    batch["logprobs"][2, 5] = -120.0
    metrics, _ = update(actor, batch)
    assert not [name for name, value in metrics.items() if not math.isfinite(value)]
    assert metrics["policy/rollout_importance_weight_max"] == pytest.approx(math.exp(20.0))


def test_equal_rewards_are_a_dead_group_in_any_dtype(make: Make) -> None:
    actor, batch = make(adv_norm=False, group_size=8), a_batch().exclude("group_index")
    batch["rewards"] = torch.full((8,), 0.1, dtype=torch.float64)
    metrics, _ = update(actor, batch)
    assert metrics["reward/dead_group_ratio"] == 1.0 and metrics["reward/std"] == 0.0
    assert metrics["optim/skipped_steps"] == metrics["perf/skipped_tokens"] == 0.0, "AdamW steps by its moments"


@pytest.mark.parametrize("name", [name for name in WITHOUT_CRITIC if not PRESETS[name]["adv_norm"]])
def test_groups_without_spread_are_skipped_and_leave_the_gradient_as_it_is(make: Make, name: str) -> None:
    """A loss of the user, here that of the preset, is given all rows."""
    batch = a_batch()
    batch["rewards"] = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0])
    choices = resolve_choices(actor_config("", algorithm=name, max_new_tokens=10))
    own = {"loss_fn": functools.partial(token_losses, choices=choices)}
    (found, params), (whole, expected) = (
        update(make(functions, algorithm=name, mb_spec=MicroBatchSpec(max_tokens_per_mb=20)), batch.clone())
        for functions in ({}, own)
    )
    assert (found["perf/skipped_tokens"], whole["perf/skipped_tokens"]) == (9 + 4 + 7 + 11, 0)
    assert found["optim/grad_norm"] > 1e-4
    for key in ("policy/loss", "optim/grad_norm", "perf/trained_tokens"):
        assert found[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-8), key
    for one, two in zip(params, expected, strict=True):
        torch.testing.assert_close(one, two, atol=2e-7, rtol=0)


def test_current_logprobs_are_the_recomputed_ones_of_a_single_step(make: Make) -> None:
    choices = {"correction": CorrectionConfig(action="truncate", upper=2.0), "algorithm": "grpo", "kl_ctl": 0.2}
    assert_same(*(update(make(proximal=proximal, **choices), a_batch()) for proximal in ("recompute", "current")))


def test_cut_off_answers_can_be_left_out_of_sum_and_count(make: Make) -> None:
    """As if they had no trained token, but their reward stays in the baseline."""
    masked, batch = make(truncated="mask", algorithm="grpo"), a_batch()
    found = update(masked, batch)
    by_hand = a_batch()
    actor = make(algorithm="grpo")
    actor.compute_advantages(by_hand)
    by_hand["loss_mask"][7] = 0
    by_hand["advantages"][7] = 0.0
    expected = actor.ppo_update(by_hand)
    for name in ("policy/loss", "optim/grad_norm", "perf/trained_tokens"):
        assert found[0][name] == pytest.approx(expected[name], rel=1e-6), name


def test_a_kl_penalty_in_the_loss_acts_without_spread_too(make: Make, lm_path: str) -> None:
    actor, batch = make(algorithm="reinforce_plus_plus_baseline", adv_norm=False, kl_ctl=0.5), a_batch()
    batch["rewards"] = torch.ones(8)
    batch["logprobs"] = actor.compute_logprobs(batch) * batch["loss_mask"]
    metrics, _ = update(actor, batch)
    mask = trained_tokens(batch["attention_mask"], batch["loss_mask"])
    model = AutoModelForCausalLM.from_pretrained(lm_path, dtype=torch.float32)
    loss = 0.5 * (0.5 * (plain_logprobs(model, batch) - batch["ref_logprobs"]).square())[mask].mean()  # k2
    loss.backward()
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4) and metrics["perf/skipped_tokens"] == 0
    assert metrics["optim/grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-3)


def test_an_entropy_bonus_has_the_gradient_of_the_entropy(make: Make, lm_path: str) -> None:
    actor, batch = make(entropy_ctl=0.5, adv_norm=False, temperature=0.7), a_batch()
    batch["rewards"] = torch.zeros(8)
    metrics, _ = update(actor, batch)
    mask = trained_tokens(batch["attention_mask"], batch["loss_mask"])
    model = AutoModelForCausalLM.from_pretrained(lm_path, dtype=torch.float32)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1] / 0.7
    entropy = torch.distributions.Categorical(logits=logits).entropy()[mask[:, 1:]].mean()
    (-0.5 * entropy).backward()
    assert metrics["policy/entropy"] == pytest.approx(entropy.item(), rel=1e-5) and metrics["perf/skipped_tokens"] == 0
    assert metrics["policy/loss"] == pytest.approx(-0.5 * entropy.item(), rel=1e-5)
    assert metrics["optim/grad_norm"] == pytest.approx(gradient_norm(model), rel=1e-3)


def test_masks_and_corrections_leave_the_sum_but_not_the_count(make: Make) -> None:
    actor, batch = make(proximal="recompute", sequence_mask_delta=0.5, adv_norm=False), a_batch()
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    batch["logprobs"] = batch["proximal_logprobs"] * batch["loss_mask"]
    batch["logprobs"][3] += 1.0 * batch["loss_mask"][3]  # drifted, and punished
    batch["logprobs"][4] += 1.0 * batch["loss_mask"][4]  # drifted, but rewarded
    batch["rewards"] = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0])
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    trained = sum(LENGTHS) - 2 * 8
    assert metrics["policy/rollout_importance_dropped_ratio"] == pytest.approx((LENGTHS[3] - 2) / trained)
    assert metrics["policy/loss"] == pytest.approx(-(trained - (LENGTHS[3] - 2)) / trained, rel=1e-5)


def test_functions_of_the_user_replace_objective_and_baseline(make: Make) -> None:
    seen = []

    def loss_fn(logprobs: torch.Tensor, micro_batch: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -micro_batch["advantages"] * logprobs, {"surprise": -logprobs.detach()}

    def advantage_fn(rewards: torch.Tensor, group_index: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        seen.append((rewards, group_index, num_tokens))
        return (rewards > rewards.median()).float() - 0.5

    functions = {"loss_fn": loss_fn, "advantage_fn": advantage_fn}
    batch = a_batch()
    mine = update(make(functions, adv_norm=False), batch)
    assert seen[0][1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and seen[0][2].tolist() == [n - 2 for n in LENGTHS]
    expected = (batch["rewards"] > batch["rewards"].median()).float() - 0.5
    assert torch.equal(batch["advantages"], expected[:, None] * batch["loss_mask"])
    assert mine[0]["policy/surprise"] > 0
    builtin = make({"advantage_fn": advantage_fn}, objective="reinforce", adv_norm=False)
    theirs = update(builtin, a_batch())
    assert mine[0]["policy/loss"] == pytest.approx(theirs[0]["policy/loss"], rel=1e-6)
    for one, two in zip(mine[1], theirs[1]):
        assert torch.equal(one, two)


def scaled(logprobs: torch.Tensor, micro_batch: TensorDict, factor: float = 1.0) -> torch.Tensor:
    return -factor * micro_batch["advantages"] * logprobs


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (lambda p, mb: scaled(p, mb), "loss_fn must return (token losses, statistics): got a tensor of shape [62] and"),
        (lambda p, mb: (scaled(p, mb).mean(), {}), "one loss per token, a real tensor of shape [62]: got a tensor of"),
        (lambda p, mb: (scaled(p, mb)[:, None], {}), "of shape [62]: got a tensor of shape [62, 1] and torch.float32."),
        (lambda p, mb: (scaled(p.detach(), mb), {}), "loss_fn must return losses that depend on logprobs: got a"),
        (lambda p, mb: (scaled(p, mb, math.nan), {}), "loss_fn must return finite losses of trained tokens: got nan. "),
        (lambda p, mb: (scaled(p, mb), {"x": 0.5}), "statistic 'x' of loss_fn must have one value per token, a real"),
        (lambda p, mb: (scaled(p, mb), {"x": p.mean()}), "[62]: got a tensor of shape [] and torch.float32. Leave out"),
    ],
)
def test_a_loss_of_the_user_that_means_something_else_is_told(make: Make, loss_fn: object, told: str) -> None:
    """A mean and a column would be broadcast over tokens, and be trained on."""
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        update(make({"loss_fn": loss_fn}, adv_norm=False), a_batch())
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_what_a_loss_of_the_user_reads_is_0_outside_of_the_mask(make: Make) -> None:
    """So that a plain formula is enough: 0 times NaN would be NaN, also as a gradient."""
    choices = {"objective": "reinforce", "proximal": "recompute", "adv_norm": False}
    batch = a_batch()
    builtin = update(make(**choices), batch)
    mask = batch["loss_mask"].bool()
    batch["logprobs"] = torch.where(mask, batch["logprobs"], math.nan)

    def plain(logprobs: torch.Tensor, micro_batch: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = (logprobs - micro_batch["rollout_logprobs"]).exp() / (logprobs - micro_batch["rollout_logprobs"]).exp()
        return -ratio.detach() * micro_batch["advantages"] * logprobs, {"ratio": ratio}

    found = update(make({"loss_fn": plain}, **choices), batch)
    assert found[0]["optim/skipped_steps"] == 0.0
    for one, two in zip(found[1], builtin[1]):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_a_statistic_of_the_user_replaces_no_metric_of_ours(make: Make) -> None:
    """Refused by name are all metrics that an update has with any loss."""
    batch, name = a_batch(), "ratio"
    batch["teacher_logprobs"] = batch["ref_logprobs"]
    own: dict[str, object] = {"loss_fn": lambda p, mb: (scaled(p, mb), {name: p})}
    ours: set[str] = set()
    for changes in ({"proximal": "current", "kl_ctl": 0.1, "kl_in": "loss"}, {"algorithm": "opd", "adv_norm": False}):
        metrics, _ = update(make(own, **changes), batch.clone())
        ours |= {key.removeprefix("policy/") for key in metrics if "policy/" in key}
    actor = make(own, adv_norm=False)
    for name in ours - {"ratio"}:
        with pytest.raises(ValueError, match=f"must have a name of its own: got '{name}', a metric of the actor"):
            update(actor, a_batch())
    assert ours >= {"loss", "entropy", "ref_kl", "teacher_kl", "mismatch_kl", "ratio_max"}


def test_an_advantage_that_a_teacher_would_replace_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"advantage_fn must not be given with actor\.baseline teacher: got one"):
        make({"advantage_fn": lambda r, g, n: r}, algorithm="opd")


def test_groups_may_have_any_numbers(make: Make) -> None:
    """Multiples of the number of minibatches, too, which would all be in one."""
    batch, renumbered = a_batch(), a_batch()
    renumbered["group_index"] = renumbered["group_index"] * 10**12 - 4
    plain, found = (update(make(algorithm="grpo", ppo_n_minibatches=2), one) for one in (batch, renumbered))
    assert found[0]["optim/skipped_steps"] == 0.0
    assert_same(plain, found)


@pytest.mark.parametrize(
    ("advantage_fn", "told"),
    [
        (lambda r, g, n: r.mean(), "advantage_fn must return one advantage per completion, a real tensor of shape"),
        (lambda r, g, n: r[:, None], "of shape [8]: got a tensor of shape [8, 1] and torch.float32. All tokens of one"),
        (lambda r, g, n: None, "of shape [8]: got a NoneType. All tokens of one share it."),
        (lambda r, g, n: r / 0 - r / 0, "advantage_fn must return finite advantages: got nan. Divide by"),
    ],
)
def test_an_advantage_of_the_user_that_means_something_else_is_told(
    make: Make, advantage_fn: object, told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        make({"advantage_fn": advantage_fn}, adv_norm=False).compute_advantages(a_batch())


def test_statistics_may_carry_a_gradient_and_advantages_be_flags(make: Make) -> None:
    functions = {
        "loss_fn": lambda p, mb: (scaled(p, mb), {"surprise": -p, "rare": p < -3.0}),
        "advantage_fn": lambda r, g, n: r > r.median(),
    }
    metrics, _ = update(make(functions, adv_norm=False), a_batch())
    assert metrics["policy/surprise"] > 0 and 0 <= metrics["policy/rare"] <= 1


@pytest.mark.parametrize(
    ("algorithm", "reward", "told"),
    [
        ("grpo", math.nan, "rewards must be finite: got nan. Fix the reward function, or reject such rows."),
        ("max_rl", -0.5, "rewards must be at least 0 with reward_scale group_mean: got -0.5"),
    ],
)
def test_a_reward_that_means_nothing_is_told(make: Make, algorithm: str, reward: float, told: str) -> None:
    batch = a_batch()
    batch["rewards"][2] = reward
    with pytest.raises(ValueError, match=re.escape(told)):
        make(algorithm=algorithm).compute_advantages(batch)

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import actor_config, plain_logprobs, trajectory_batch
from transformers import AutoModelForCausalLM, GPT2Config

from arealite.api.cli_args import CorrectionConfig, GRPOConfig, MicroBatchSpec, OptimizerConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.engine.ppo.actor import FSDPPPOActor

CONFIGS = Path(__file__).parents[2] / "examples/arealite/configs"
CHOICES = ("group_size", "baseline", "reward_scale", "adv_norm")
DECOUPLED = {"proximal": "recompute", "correction": CorrectionConfig(action="mask")}
LENGTHS = [9, 4, 12, 3, 7, 11, 8, 8]
Make = Callable[..., FSDPPPOActor]


@pytest.fixture
def make(start: Callable[..., Any], lm_path: str) -> Make:
    return lambda path=lm_path, **changes: start(FSDPPPOActor(actor_config(path, **changes)))


def test_logprobs_are_those_of_transformers_at_the_temperature(make: Make, lm_path: str) -> None:
    batch = trajectory_batch(LENGTHS, 2)
    logprobs = make(temperature=0.7, mb_spec=MicroBatchSpec(max_tokens_per_mb=14)).compute_logprobs(batch)
    reference = AutoModelForCausalLM.from_pretrained(lm_path, dtype=torch.float32)
    torch.testing.assert_close(logprobs, plain_logprobs(reference, batch, 0.7).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config_file", ["gsm8k_grpo.yaml", "gsm8k_grpo_cpu.yaml", None])
def test_shipped_configs_and_defaults_are_grpo(make: Make, tmp_path: Path, config_file: str | None) -> None:
    """Neither an easy prompt is reinforced, nor a hopeless one punished."""
    file = tmp_path / "config.yaml"
    file.write_text("{experiment_name: e, trial_name: t, train_dataset: {path: p, batch_size: 8}}")
    path = str(file if config_file is None else CONFIGS / config_file)
    config = load_expr_config(["--config", path, "actor.path=m", "gconfig.n_samples=4"], GRPOConfig)[0].actor
    objective = {name: getattr(config, name) for name in (*CHOICES, "reward_clip")}
    batch = trajectory_batch([5, 9, 4, 7] * 3, 4)
    batch["rewards"] = torch.tensor([1.0] * 4 + [0.0] * 4 + [1.0, 0.0, 0.0, 0.0])
    make(**objective).compute_advantages(batch)
    expected = torch.tensor([0.0] * 8 + [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)
    torch.testing.assert_close(batch["advantages"], expected[:, None] * batch["loss_mask"], atol=1e-5, rtol=1e-5)


def test_the_kl_penalty_is_that_of_the_sampling_policy(make: Make) -> None:
    """With decoupled loss the proximal policy plays no part in it."""
    actor, batch = make(kl_ctl=0.5, **DECOUPLED, adv_norm=False), trajectory_batch([5, 5], 2)
    batch["ref_logprobs"] = batch["logprobs"] - batch["loss_mask"] * 0.2
    # Each of the three sampled tokens costs 0.1 and pays for itself and those before it.
    expected = batch["rewards"][:, None] - torch.tensor([0.0, 0.0, 0.3, 0.2, 0.1])
    for shift in (0.0, 1.0):
        batch["proximal_logprobs"] = batch["logprobs"] - shift
        actor.compute_advantages(batch)
        torch.testing.assert_close(batch["advantages"], expected * batch["loss_mask"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kl_ctl": 0.5}, "must have 'ref_logprobs' with kl_ctl > 0"),
        ({"truncated": "zero"}, "must have 'no_eos' with truncated: zero"),
        (DECOUPLED, "must have 'proximal_logprobs' with proximal: recompute"),
    ],
)
def test_what_a_batch_lacks_is_named(make: Make, changes: dict[str, object], told: str) -> None:
    actor, batch = make(**changes), trajectory_batch(LENGTHS, 2)
    with pytest.raises(ValueError, match=told):
        actor.compute_advantages(batch)
        actor.ppo_update(batch)


def test_keys_of_the_original_are_refused_rather_than_ignored(make: Make) -> None:
    batch = trajectory_batch(LENGTHS, 2)
    batch["prox_logp"] = batch["logprobs"].clone()
    actor = make()
    actor.compute_advantages(batch)
    with pytest.raises(ValueError, match="'prox_logp' of a batch must be called 'proximal_logprobs'"):
        actor.ppo_update(batch)


def test_stepping_the_schedule_after_an_update_changes_nothing(make: Make) -> None:
    optimizer = OptimizerConfig(lr=0.1, lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    actor = make(optimizer=optimizer, ppo_n_minibatches=1)
    seen = []
    for explicit in (True, False, True):
        batch = trajectory_batch(LENGTHS, 2)
        actor.compute_advantages(batch)
        seen.append(actor.ppo_update(batch)["optim/lr"])
        if explicit:
            actor.step_lr_scheduler()
    assert seen == pytest.approx([0.1, 0.09, 0.08])


@pytest.mark.parametrize("by_group", [True, False])
def test_advantages_are_standardised_over_tokens(make: Make, by_group: bool) -> None:
    batch = trajectory_batch(LENGTHS, 4)
    make(group_size=4, group_adv_norm=by_group).compute_advantages(batch)
    mask = batch["loss_mask"].bool()
    for rows in (slice(0, 4), slice(4, 8)) if by_group else (slice(0, 8),):
        tokens = batch["advantages"][rows][mask[rows]].double()
        assert tokens.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert tokens.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-4)
    assert (batch["advantages"][~mask] == 0).all()


def test_without_group_index_rows_are_taken_in_order_as_whole_groups(make: Make) -> None:
    actor, batch = make(group_size=4, baseline="group_mean", reward_scale="group_std"), trajectory_batch(LENGTHS, 4)
    bare = batch.exclude("group_index")
    for one in (batch, bare):
        actor.compute_advantages(one)
    assert torch.equal(batch["advantages"], bare["advantages"])
    with pytest.raises(ValueError, match="must be a multiple of group_size 4: got 6"):
        actor.compute_advantages(bare[:6])


def test_ratios_of_an_unchanged_policy_are_1_also_if_the_model_has_dropout(make: Make, tmp_path: Path) -> None:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
    model_config = GPT2Config(vocab_size=49, n_embd=16, n_layer=2, n_head=2, **dropout)
    AutoModelForCausalLM.from_config(model_config).save_pretrained(tmp_path)
    actor, batch = make(path=str(tmp_path), ppo_n_minibatches=1, **DECOUPLED), trajectory_batch(LENGTHS, 2)
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    assert metrics["policy/approx_kl"] < 1e-9 and metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_log_ratios_are_those_that_each_minibatch_met(make: Make) -> None:
    settings = {
        "group_size": 2,
        "baseline": "group_mean",
        "adv_norm": False,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=16),
    }
    actor, batch = make(ppo_n_minibatches=2, **DECOUPLED, **settings), trajectory_batch(LENGTHS, 2)
    batch["rewards"] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])  # the third group has no spread
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    batch["logprobs"] = batch["proximal_logprobs"] * batch["loss_mask"]
    actor.compute_advantages(batch)
    batch["logprobs"] -= 0.25 * batch["loss_mask"]
    assert actor.per_token == {}
    metrics = actor.ppo_update(batch)
    found, gap = (torch.full(batch["input_ids"].shape, math.nan) for _ in range(2))
    for padded, key in ((found, "log_ratio"), (gap, "logprob_gap")):
        padded[batch["attention_mask"]] = actor.per_token[key]
    is_trained = batch["loss_mask"].bool()
    is_trained[4:6] = False
    assert torch.equal(found.isfinite(), is_trained) and torch.equal(gap.isfinite(), is_trained)
    torch.testing.assert_close(gap[is_trained], torch.full_like(gap[is_trained], 0.25))
    first, second = ([0, 1], [2, 3, 6, 7])  # groups 0 and 2, 1 and 3
    assert found[first][is_trained[first]].abs().max() < 1e-5
    assert found[second][is_trained[second]].abs().min() > 1e-5
    assert metrics["policy/ratio"] == pytest.approx(found[is_trained].exp().mean().item(), rel=1e-6)
    actor.compute_advantages(batch)
    assert actor.per_token == {}, "the next batch may not be updated on"


def test_there_are_no_more_steps_than_groups(make: Make) -> None:
    actor, batch = make(ppo_n_minibatches=4), trajectory_batch(LENGTHS, 4)
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    assert metrics["optim/skipped_steps"] == 0.0
    steps = {int(state["step"]) for state in actor.optimizer.state.values()}
    assert steps == {2} and actor.lr_schedule.num_steps == 1


def test_metrics_of_an_on_policy_batch(make: Make) -> None:
    actor, batch = make(ppo_n_minibatches=1, **DECOUPLED), trajectory_batch(LENGTHS, 2)
    mask = batch["loss_mask"].bool()
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    batch["logprobs"] = batch["proximal_logprobs"] * mask
    batch["versions"][5] = torch.where(mask[5], 2, -1)
    batch["no_eos"] = torch.tensor([True] * 2 + [False] * 6)
    batch["turns"], batch["turns_max"] = torch.arange(8), torch.arange(8)
    batch["rewards/brevity"] = torch.tensor([0.5] * 4 + [1.0] * 4)
    actor.set_version(3)
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/clip_ratio"] == 0.0
    assert metrics["staleness/max"] == 3.0 and metrics["staleness/mean"] == pytest.approx((7 * 3 + 1) / 8)
    assert metrics["reward/mean"] == pytest.approx(batch["rewards"].mean().item())
    assert metrics["rollout/prompt_tokens"] == 2.0
    assert metrics["rollout/completion_tokens"] == pytest.approx(sum(LENGTHS) / 8 - 2)
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert (metrics["workflow/turns"], metrics["workflow/turns_max"]) == (3.5, 7.0)
    assert metrics["rewards/brevity"] == 0.75
    assert not {name for name in metrics if "group_index" in name or "no_eos" in name}
    assert metrics["perf/processed_tokens"] == sum(LENGTHS)
    assert metrics["perf/trained_tokens"] == sum(LENGTHS) - 2 * len(LENGTHS)
    assert 0 < metrics["policy/entropy"] < 4


def test_metrics_tell_spread_extremes_and_what_was_left_out(make: Make) -> None:
    actor, batch = (
        make(ppo_n_minibatches=1, proximal="recompute", correction=CorrectionConfig(action="mask", upper=2.0)),
        trajectory_batch(LENGTHS, 2),
    )
    mask = batch["loss_mask"].bool()
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    batch["logprobs"] = batch["proximal_logprobs"] * mask
    batch["logprobs"][0, 3] -= 80.0  # its weight is e^80
    batch["ref_logprobs"] = batch["logprobs"] - 0.25 * mask
    batch["rewards"] = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    batch["proximal_logprobs"][2, 4] -= 1.0  # so that its ratio is e
    actor.compute_advantages(batch)
    metrics = actor.ppo_update(batch)
    assert metrics["policy/rollout_importance_weight"] == pytest.approx(
        (mask.sum().item() - 2 + math.exp(-1)) / (mask.sum().item() - 1), rel=1e-5
    )
    assert metrics["policy/rollout_importance_dropped_ratio"] == pytest.approx(1 / mask.sum().item())
    assert metrics["policy/ratio_max"] == pytest.approx(math.e, rel=1e-4)
    assert metrics["policy/rollout_importance_weight_max"] == pytest.approx(1.0, rel=1e-4), "of what was kept"
    assert metrics["policy/clip_ratio_high"] + metrics["policy/clip_ratio_low"] == metrics["policy/clip_ratio"]
    assert metrics["policy/ref_kl"] == pytest.approx(math.exp(-0.25) - 1 + 0.25, rel=1e-5)
    assert metrics["reward/std"] == pytest.approx(0.5)
    assert metrics["reward/dead_group_ratio"] == 0.5  # of four groups, the first and the third
    assert metrics["rollout/completion_tokens_min"] == min(LENGTHS) - 2
    assert metrics["rollout/completion_tokens_max"] == max(LENGTHS) - 2


def test_recomputed_logprobs_without_a_correction_take_the_place_of_the_servers(make: Make) -> None:
    found = {}
    for name, choices in {
        "server": {"proximal": "rollout"},
        "recomputed": {"proximal": "recompute"},
        "decoupled": DECOUPLED,
    }.items():
        actor, batch = make(ppo_n_minibatches=1, **choices), trajectory_batch(LENGTHS, 2)
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        batch["logprobs"] = (batch["proximal_logprobs"] + 0.1) * batch["loss_mask"]
        actor.compute_advantages(batch)
        found[name] = actor.ppo_update(batch)
    gap = math.exp(-0.1)
    ratios = {name: metrics["policy/ratio"] for name, metrics in found.items()}
    assert ratios == pytest.approx({"server": gap, "recomputed": 1.0, "decoupled": 1.0}, abs=1e-5)
    assert found["decoupled"]["policy/mismatch_kl"] == pytest.approx(gap - 1 + 0.1, abs=1e-5)
    assert found["decoupled"]["policy/rollout_importance_weight"] == pytest.approx(gap, abs=1e-5)
    norms = {
        name: metrics["optim/grad_norm"] / found["recomputed"]["optim/grad_norm"] for name, metrics in found.items()
    }
    assert norms == pytest.approx({"server": gap, "recomputed": 1.0, "decoupled": gap}, rel=1e-4)


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_tokens_whose_logprob_the_server_does_not_know_are_left_out_and_counted(make: Make, is_decoupled: bool) -> None:
    actors = [make(**(DECOUPLED if is_decoupled else {}), kl_ctl=0.1, ppo_n_minibatches=1) for _ in range(2)]
    batches = [trajectory_batch(LENGTHS, 2) for _ in actors]
    batches[0]["logprobs"][2, 5] = -9999.0  # as vLLM reports a logprob that is not finite
    batches[1]["loss_mask"][2, 5] = 0
    found = []
    for actor, batch in zip(actors, batches):
        batch["ref_logprobs"] = batch["logprobs"].clamp(min=-5) - 0.1
        if is_decoupled:
            batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        actor.compute_advantages(batch)
        found.append(actor.ppo_update(batch))
    assert torch.equal(batches[0]["advantages"], batches[1]["advantages"])
    assert found[0]["optim/skipped_steps"] == 0.0 and found[0]["rollout/unknown_logprobs"] == 1.0
    assert found[1]["rollout/unknown_logprobs"] == 0.0
    for name in ("optim/grad_norm", "policy/loss", "policy/ref_kl", "perf/trained_tokens"):
        assert found[0][name] == found[1][name] and math.isfinite(found[0][name])
    for first, second in zip(*(actor.model.parameters() for actor in actors)):
        assert torch.equal(first.full_tensor(), second.full_tensor())


def test_a_reference_has_no_optimizer(make: Make) -> None:
    actor, ref = make(), make(optimizer=None)
    batch = trajectory_batch(LENGTHS, 2)
    assert torch.equal(actor.compute_logprobs(batch), ref.compute_logprobs(batch))
    batch["proximal_logprobs"] = ref.compute_logprobs(batch)
    ref.compute_advantages(batch)
    with pytest.raises(ConfigError, match=r"optimizer must be given .* Pass optimizer=OptimizerConfig\(\)"):
        ref.ppo_update(batch)

"""Runs of several rows: groups, metrics and baselines count a run once, however many rows it has."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from training_cases import actor_config, trajectory_batch

from arealite.algorithms.advantages import AdvantageFn
from arealite.engine.ppo.actor import FSDPPPOActor

Make = Callable[..., FSDPPPOActor]
ROWS_OF_RUNS = [3, 1, 1, 2]  # two groups of two runs


@pytest.fixture
def make(start: Callable[..., Any], lm_path: str) -> Make:
    def make_actor(advantage_fn: AdvantageFn | None = None, **changes: object) -> FSDPPPOActor:
        config = actor_config(lm_path, **{"group_size": 2, "adv_norm": False, **changes})
        return start(FSDPPPOActor(config, advantage_fn=advantage_fn))

    return make_actor


def batch_of(rewards: list[float], rows_of_runs: list[int] = ROWS_OF_RUNS) -> TensorDict:
    """Return two groups of two runs with these rewards; the rows have 1, 2, 3 ... sampled tokens."""
    runs = torch.arange(4).repeat_interleave(torch.tensor(rows_of_runs))
    batch = trajectory_batch([3 + row for row in range(len(runs))], 1)
    batch["rewards"] = torch.tensor(rewards)[runs]
    batch["group_index"], batch["sample_index"] = runs // 2, runs % 2
    return batch


def of_runs(batch: TensorDict) -> list[float]:
    """Return the advantage of each run; all its tokens have the same."""
    runs, found = (2 * batch["group_index"] + batch["sample_index"]).tolist(), {}
    for run, advantages, mask in zip(runs, batch["advantages"], batch["loss_mask"].bool(), strict=True):
        found.setdefault(run, set()).update(round(one, 5) for one in advantages[mask].tolist())
        assert not advantages[~mask].any()
    assert all(len(values) == 1 for values in found.values())
    return [values.pop() for _, values in sorted(found.items())]


LENGTHS = [1 + 2 + 3, 4, 5, 6 + 7]  # of the runs
WEIGHTED = [(1.0 * LENGTHS[0]) / (LENGTHS[0] + LENGTHS[1]), (3.0 * LENGTHS[3]) / (LENGTHS[2] + LENGTHS[3])]


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group_mean", "none", [0.5, -0.5, -1.5, 1.5]),
        ("leave_one_out", "none", [1.0, -1.0, -3.0, 3.0]),
        ("length_weighted", "none", [1.0 - WEIGHTED[0], -WEIGHTED[0], -WEIGHTED[1], 3.0 - WEIGHTED[1]]),
        ("group_mean", "group_std", [1.0, -1.0, -1.0, 1.0]),
        ("group_mean", "batch_std", [one / math.sqrt(1.5) for one in (0.5, -0.5, -1.5, 1.5)]),
        ("group_mean", "group_mean", [1.0, -1.0, -1.0, 1.0]),
        ("none", "none", [1.0, 0.0, 0.0, 3.0]),
    ],
)
def test_every_baseline_and_scale_counts_runs(make: Make, baseline: str, scale: str, expected: list[float]) -> None:
    """Rewards of turns play no part in baselines of groups."""
    batch = batch_of([1.0, 0.0, 0.0, 3.0])
    if baseline == "group_mean":
        batch["turn_rewards"] = torch.rand(batch["loss_mask"].shape) * batch["loss_mask"]
    make(baseline=baseline, reward_scale=scale).compute_advantages(batch)
    assert of_runs(batch) == pytest.approx(expected, abs=1e-4)


def test_the_penalty_of_an_answer_is_that_of_all_its_rows(make: Make) -> None:
    batch = batch_of([1.0, 0.0, 0.0, 3.0])
    batch["ref_logprobs"] = batch["logprobs"] - 0.2 * batch["loss_mask"]  # 0.1 for each sampled token
    make(baseline="leave_one_out", reward_scale="none", kl_ctl=0.5, kl_in="reward").compute_advantages(batch)
    minus_kl = [reward - 0.1 * length for reward, length in zip([1.0, 0.0, 0.0, 3.0], LENGTHS)]
    gaps = (minus_kl[0] - minus_kl[1], minus_kl[2] - minus_kl[3])
    assert of_runs(batch) == pytest.approx([gaps[0], -gaps[0], gaps[1], -gaps[1]], abs=1e-4)


def test_an_own_advantage_function_gets_runs(make: Make) -> None:
    seen = []

    def advantages(rewards: torch.Tensor, group_index: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        seen.extend([rewards.tolist(), group_index.tolist(), num_tokens.tolist()])
        return rewards * 10

    batch = batch_of([1.0, 0.0, 0.0, 3.0])
    make(advantages).compute_advantages(batch)
    assert seen == [[1.0, 0.0, 0.0, 3.0], [0, 0, 1, 1], LENGTHS]
    assert of_runs(batch) == [10.0, 0.0, 0.0, 30.0]


def test_a_run_is_cut_off_where_one_of_its_rows_is(make: Make) -> None:
    batch = batch_of([1.0, 1.0, 2.0, 2.0])
    batch["no_eos"] = torch.tensor([False, True, False, False, False, False, False])
    make(truncated="zero", baseline="none").compute_advantages(batch)
    assert of_runs(batch) == [0.0, 1.0, 2.0, 2.0]


def test_metrics_count_a_run_once(make: Make) -> None:
    batch = batch_of([1.0, 0.0, 2.0, 2.0])
    batch["num_turns"] = torch.tensor([3.0, 3.0, 3.0, 5.0, 1.0, 2.0, 2.0])
    batch["no_eos"] = torch.tensor([False, True, True, False, False, False, False])
    metrics = make().describe(batch)
    assert metrics["reward/mean"] == 1.25 and metrics["workflow/num_turns"] == 2.75
    assert metrics["reward/std"] == pytest.approx(math.sqrt(11) / 4)
    assert metrics["reward/dead_group_ratio"] == 0.5 and metrics["rollout/truncated_ratio"] == 0.25
    assert [metrics[f"rollout/completion_tokens{end}"] for end in ("", "_min", "_max")] == [28 / 4, 4, 13]
    assert metrics["perf/trained_tokens"] == 28 and metrics["rollout/prompt_tokens"] == 2


def test_runs_without_groups_are_refused(make: Make) -> None:
    batch = batch_of([1.0, 0.0, 2.0, 2.0]).exclude("group_index")
    with pytest.raises(ValueError, match=r"must be a multiple of group_size 2: got .*sample_index.* group_index"):
        make(baseline="group_mean").compute_advantages(batch)


@pytest.mark.parametrize("baseline", ["critic", "none"])
def test_a_critic_sees_rewards_where_turns_earned_them(make: Make, baseline: str) -> None:
    """Two turns of 2 and 1 tokens earn 1 and 2 times 10; the bias of 0.5 times 10 comes at the end."""
    batch = trajectory_batch([7], 1)
    batch["loss_mask"] = torch.tensor([[0, 0, 1, 1, 0, 0, 1]])
    batch["rewards"], batch["turn_rewards"] = torch.tensor([4.0]), torch.tensor([[0, 0, 0, 1.0, 0, 0, 2.0]])
    batch["values"] = torch.tensor([[9, 9, 0.5, 0.25, 9, 9, 0.125]])
    settings = {"reward_scaling": 10.0, "reward_bias": 0.5, "reward_clip": None}
    make(
        **settings, baseline=baseline, gae_lambda=1.0, returns_lambda=1.0 if baseline == "critic" else None
    ).compute_advantages(batch)
    to_go = torch.tensor([[0, 0, 35.0, 35.0, 0, 0, 25.0]])
    if baseline == "critic":
        torch.testing.assert_close(batch["returns"], to_go)
        to_go -= batch["values"] * batch["loss_mask"]
    torch.testing.assert_close(batch["advantages"], to_go)

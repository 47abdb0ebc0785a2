import math
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from arealite.api.run_metrics import named
from arealite.rollout.evaluation import evaluation_metrics, pass_at, pass_metrics, share_with_interval


def batch_of(groups: Sequence[Sequence[float]], lengths: Sequence[int] | None = None) -> TensorDict:
    """Return the samples of some prompts by their rewards; a sample has two tokens unless `lengths` says otherwise."""
    rewards = [reward for group in groups for reward in group]
    lengths = lengths or [2] * len(rewards)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    index = [number for number, group in enumerate(groups) for _ in group]
    columns = {"rewards": torch.tensor(rewards), "loss_mask": mask, "group_index": torch.tensor(index)}
    return TensorDict(columns, batch_size=[len(rewards)])


def test_a_prompt_without_a_result_is_wrong() -> None:
    metrics = evaluation_metrics(batch_of([[1.0]] * 60 + [[0.0]] * 20), num_prompts=100)
    assert metrics["accuracy"] == pytest.approx(0.6)
    assert (metrics["num_samples"], metrics["num_failed"]) == (80, 20)


def test_every_prompt_has_one_vote() -> None:
    metrics = evaluation_metrics(batch_of([[1.0] * 4, [0.0]], lengths=[3, 3, 3, 3, 7]), num_prompts=2)
    assert (metrics["accuracy"], metrics["completion_tokens"]) == (0.5, 5.0)


def test_a_run_of_several_rows_is_one_sample() -> None:
    """The first prompt has a right run of three rows and a wrong one, the second a wrong one."""
    batch = batch_of([[1.0, 1.0, 1.0, 0.0], [0.0]], lengths=[1, 2, 3, 4, 5])
    batch["sample_index"] = torch.tensor([0, 0, 0, 1, 0])
    batch["no_eos"] = torch.tensor([False, True, False, False, True])
    batch["turns"] = torch.tensor([3, 3, 3, 1, 8])
    metrics = evaluation_metrics(batch, num_prompts=2)
    assert (metrics["accuracy"], metrics["num_samples"], metrics["turns"]) == (0.25, 3, 5)
    assert (metrics["completion_tokens"], metrics["truncated_ratio"]) == (5.0, 0.75)


def test_a_metric_of_the_workflow_is_not_taken_for_ours() -> None:
    batch = batch_of([[2.5], [0.5]])
    batch["accuracy"], batch["accuracy_strict"] = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    metrics = evaluation_metrics(batch, num_prompts=2)
    assert (metrics["reward"], metrics["workflow/accuracy"], metrics["accuracy_strict"]) == (1.5, 0.5, 1.0)
    assert "accuracy" not in metrics
    own = {"eval/workflow/accuracy": 0.5, "eval/accuracy_strict": 1.0}
    assert named({"eval/reward": 1.5, "eval/accuracy": 0.5, "reward/other_max": 1.0} | own).keys() >= own.keys()


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, 0.2775), (8, 0.4902, 0.9433), (10, 0.7225, 1.0)])
def test_wilsons_interval_of_ten_prompts(right: int, low: float, high: float) -> None:
    """Numbers of statsmodels' `proportion_confint(right, 10, method="wilson")`."""
    metrics = evaluation_metrics(batch_of([[1.0]] * right + [[0.0]] * (10 - right)), num_prompts=10)
    assert metrics["accuracy_low"] == pytest.approx(low, abs=1e-4)
    assert metrics["accuracy_high"] == pytest.approx(high, abs=1e-4)


def test_another_reward_than_0_and_1_is_no_accuracy() -> None:
    metrics = evaluation_metrics(batch_of([[0.0, 2.0], [2.0], [3.0]]), num_prompts=5)
    half = 1.96 * 1.0 / math.sqrt(3)
    assert metrics["reward"] == 2.0 and metrics["num_failed"] == 2 and "accuracy" not in metrics
    assert (metrics["reward_low"], metrics["reward_high"]) == pytest.approx((2.0 - half, 2.0 + half))


def test_a_prompt_without_a_result_counts_only_where_its_worth_is_known() -> None:
    metrics = evaluation_metrics(batch_of([[1.0], [0.0]]), num_prompts=4)
    assert (metrics["reward"], metrics["accuracy"]) == (0.5, 0.25)


def test_a_weighted_sum_is_no_accuracy() -> None:
    """Not even where all functions gave 0."""
    batch = batch_of([[0.0], [1.0]])
    batch["rewards/correct"] = torch.tensor([0.0, 1.0])
    metrics = evaluation_metrics(batch, num_prompts=2)
    assert (metrics["reward"], metrics["rewards/correct"]) == (0.5, 0.5) and "accuracy" not in metrics


def test_one_prompt_has_no_standard_error() -> None:
    assert evaluation_metrics(batch_of([[-0.75]]), num_prompts=1) == {
        "reward": -0.75, "completion_tokens": 2.0, "num_samples": 1.0, "num_failed": 0.0,
    }  # fmt: skip


@given(st.integers(1, 10).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at(k, c, n) == pytest.approx(float(Fraction(sum(map(max, subsets)), len(subsets))), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 3, 1), (10_000, 1, 5_000), (100_000, 2, 100), (1000, 1000, 1000)])
def test_pass_at_k_of_many_samples(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at(k, c, n) == pytest.approx(float(exact), rel=1e-9)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_pass_at_1_is_the_mean_and_pass_grows_with_k(right: list[int]) -> None:
    ks = [*range(1, 9)]
    metrics = pass_metrics(right, 8, ks)
    rewards = evaluation_metrics(batch_of([[1.0] * c + [0.0] * (8 - c) for c in right]), num_prompts=len(right))
    for end in ("", "_low", "_high"):
        assert metrics[f"pass@1{end}"] == pytest.approx(rewards[f"accuracy{end}"], abs=1e-9)
    values = [metrics[f"pass@{k}"] for k in ks]
    assert values == sorted(values) and values[-1] == pytest.approx(sum(c > 0 for c in right) / len(right))
    for k in ks:
        low, value, high = (metrics[f"pass@{k}{end}"] for end in ("_low", "", "_high"))
        assert 0 <= low <= value + 1e-12 and value <= high + 1e-12 and high <= 1


def test_several_samples_say_more_than_one_and_at_most_as_much_as_so_many_prompts() -> None:
    def width(values: list[float], size: int = 1) -> float:
        metrics = share_with_interval("x", values, max_information=size)
        return metrics["x_high"] - metrics["x_low"]

    assert width([0.5] * 20, 4) == pytest.approx(width([0.0, 1.0] * 40), abs=1e-12)  # as 80 independent prompts
    assert width([0.0, 1.0] * 10, 4) == pytest.approx(width([0.0, 1.0] * 10), abs=1e-12)  # all samples alike
    assert width([0.0] * 20, 4) == pytest.approx(width([0.0] * 20), abs=1e-12)
    assert width([0.25, 0.75] * 10, 8) == pytest.approx(width([0.0, 1.0] * 40), abs=1e-12)  # a quarter of the variance


@pytest.mark.parametrize("shares", [(0.1, 0.9), (0.0, 1.0), (0.45, 0.55), (0.02, 0.3)])
def test_the_interval_covers_the_truth_as_often_as_it_says(shares: tuple[float, float]) -> None:
    """Prompts are drawn with one of two chances to be solved; 40 of them with 4 samples, 1000 times."""
    chance, truth, covered = random.Random(0), sum(shares) / 2, 0
    for _ in range(1000):
        right = [sum(chance.random() < share for _ in range(4)) for share in chance.choices(shares, k=40)]
        metrics = pass_metrics(right, 4, [1])
        covered += metrics["pass@1_low"] <= truth <= metrics["pass@1_high"]
    assert 0.93 < covered / 1000 < 0.985

import math
from collections.abc import Sequence

import pytest
import torch
from tensordict import TensorDict

from arealite.rollout.evaluation import evaluation_metrics


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


def test_metrics_of_the_workflow_are_averaged_per_prompt() -> None:
    batch = batch_of([[1.0] * 4, [0.0]])
    batch["turns"] = torch.tensor([1, 1, 2, 2, 4])
    assert evaluation_metrics(batch, num_prompts=2)["turns"] == 2.75


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


def test_one_prompt_has_no_standard_error() -> None:
    assert evaluation_metrics(batch_of([[-0.75]]), num_prompts=1) == {
        "reward": -0.75, "completion_tokens": 2.0, "num_samples": 1.0, "num_failed": 0.0,
    }  # fmt: skip

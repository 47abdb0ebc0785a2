"""What the rows of metrics say of a run."""

import json
import tracemalloc
from pathlib import Path

from arealite.api.run_metrics import named, scores_of_steps, summarize
from arealite.utils.files import rows_of


def test_scores_are_accuracies_rewards_or_losses_after_each_step() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.2}, {"step": 3, "eval/accuracy": 0.6}]
    assert scores_of_steps(rows, [0, 1, 2, 5]) == {0: 0.2, 1: 0.2, 2: 0.6, 5: 0.6}
    assert scores_of_steps([{"step": 1, "eval/loss": 2.0}], [0]) == {0: -2.0}
    row = {"step": 1, "eval/reward": 0.8, "eval/num_failed": 3.0}
    assert scores_of_steps([row], [0]) == {}, "the prompts that failed may be the hard ones"
    assert scores_of_steps([row | {"eval/accuracy": 0.5}], [0]) == {0: 0.5}, "an accuracy has counted them as wrong"
    rows = [{"step": 0, "eval/accuracy": 0.2}, {"step": 3, "eval/reward": 0.6}, {"step": 5, "eval/accuracy": 0.3}]
    assert scores_of_steps(iter(rows), [0, 2, 4]) == {0: 0.2, 2: 0.6, 4: 0.3}, "rows are read once"


def test_scores_of_a_long_run_are_found_without_holding_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": step, "eval/accuracy": 0.5, **{f"metric/{n}": step + n / 7 for n in range(50)}} for step in range(900)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    found = scores_of_steps(rows_of(path), [800])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == {800: 0.5} and peak < path.stat().st_size / 5


def test_a_summary_calls_rewards_accuracy_only_if_all_are_0_or_1() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "eval/accuracy": 1.0}]
    assert summarize(rows, max_head_offpolicyness=0)["accuracy_after"] == 1.0
    rows.append({"step": 2, "eval/reward": 1.5})
    summary = summarize(rows, max_head_offpolicyness=0)
    assert (summary["reward_before"], summary["reward_after"]) == (0.0, 1.5) and "accuracy_before" not in summary


def test_a_reward_that_was_only_trained_on_names_the_scores_too() -> None:
    """Held-out rewards were 0, 0 and 1 by chance; one prompt has no result."""
    score = {"eval/reward": 1 / 3, "eval/accuracy": 0.25, "eval/accuracy_low": 0.1, "eval/num_failed": 1.0}
    assert named(score | {"reward/other_max": 0.0}) == score | {"reward/other_max": 0.0}
    others = {"eval/reward": 1 / 3, "eval/num_failed": 1.0, "reward/other_max": 1.0}
    assert named(score | {"reward/other_max": 1.0}) == others
    rows = [{"step": 0} | score, {"step": 1} | others]
    assert summarize(rows[:1], max_head_offpolicyness=0)["accuracy_after"] == 0.25
    summary = summarize(rows, max_head_offpolicyness=0)
    assert (summary["reward_before"], summary["reward_after"]) == (1 / 3, 1 / 3) and "accuracy_before" not in summary


def test_one_rule_holds_for_both_parts_of_an_evaluation_and_none_for_pairs() -> None:
    sampled = {"sampled/reward": 0.5, "sampled/accuracy": 0.5, "sampled/pass@1": 0.5, "sampled/pass@1_low": 0.4}
    assert named({"greedy/reward": 0.05} | sampled) == {
        "greedy/reward": 0.05, "sampled/reward": 0.5, "reward/other_max": 1.0,
    }  # fmt: skip
    assert named({"greedy/reward": 0.0, "greedy/accuracy": 0.0} | sampled).keys() >= sampled.keys()
    assert named({"eval/accuracy": 0.5, "eval/loss": 0.7}) == {"eval/accuracy": 0.5, "eval/loss": 0.7}

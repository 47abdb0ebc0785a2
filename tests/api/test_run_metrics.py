"""What the rows of metrics say of a run."""

from arealite.api.run_metrics import scores_of_steps, summarize


def test_scores_are_accuracies_rewards_or_losses_after_each_step() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.2}, {"step": 3, "eval/accuracy": 0.6}]
    assert scores_of_steps(rows, [0, 1, 2, 5]) == {0: 0.2, 1: 0.2, 2: 0.6, 5: 0.6}
    assert scores_of_steps([{"step": 1, "eval/loss": 2.0}], [0]) == {0: -2.0}
    rows = [
        {"step": 1, "eval/reward": 5.0, "eval/num_failed": 3.0},
        {"step": 2, "eval/accuracy": 0.5, "eval/num_failed": 3.0},
    ]
    assert scores_of_steps(rows[:1], [0]) == {}, "the prompts that failed may be the hard ones"
    assert scores_of_steps(rows, [0, 1]) == {1: 0.5}, "an accuracy has counted them as wrong"


def test_a_summary_calls_rewards_accuracy_only_if_all_are_0_or_1() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "eval/accuracy": 1.0}]
    assert summarize(rows, max_head_offpolicyness=0)["accuracy_after"] == 1.0
    rows.append({"step": 2, "eval/reward": 1.5})
    summary = summarize(rows, max_head_offpolicyness=0)
    assert (summary["reward_before"], summary["reward_after"]) == (0.0, 1.5) and "accuracy_before" not in summary

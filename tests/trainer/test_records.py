"""What a run folder says of steps that different processes trained."""

from __future__ import annotations

from pathlib import Path

from arealite.api.run_folder import RunFolder
from arealite.trainer.records import config_of_step, scores_of_steps, summarize, write_config


def configs(folder: Path, steps: int) -> str:
    return "".join(config_of_step(RunFolder(folder), step).read_text() for step in range(steps))


def test_every_step_has_the_config_it_was_trained_under(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_config(run, "a", start_step=0)
    write_config(run, "a", start_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "nothing has changed"
    write_config(run, "b", start_step=3)
    assert configs(tmp_path, 6) == "aaabbb"
    write_config(run, "c", start_step=5)
    assert configs(tmp_path, 7) == "aaabbcc"
    write_config(run, "d", start_step=4)
    assert configs(tmp_path, 7) == "aaabddd", "step 4 is done again"
    write_config(run, "d", start_step=2)
    assert configs(tmp_path, 7) == "aaddddd", "the run went back behind the first change"
    write_config(run, "e", start_step=0)
    assert configs(tmp_path, 3) == "eee" and len(list(tmp_path.iterdir())) == 1


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

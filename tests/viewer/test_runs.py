import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from testing_rollouts import write_rows
from testing_views import byte_tokenizer, finish, row, write_metrics, write_run

from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.api.run_metrics import score_name
from arealite.rollout.account.store import Update, write_update
from arealite.utils.files import file_lock
from arealite.viewer.describe import score_in_words
from arealite.viewer.runs import Runs, RunView


def test_runs_are_found_below_the_folder_the_newest_first(tmp_path: Path) -> None:
    for name in ("e/t0", "e/t1"):
        write_metrics(tmp_path / name, [0, 1])
    finish(tmp_path / "e/t1", 2)
    write_metrics(tmp_path / "e/t0", [2])
    (tmp_path / ".hidden/t").mkdir(parents=True)
    write_metrics(tmp_path / ".hidden/t", [0])
    table = Runs(tmp_path).table()
    keys = ("steps", "reward", "held_out", "state")
    assert {line["run"]: tuple(line[key] for key in keys) for line in table} == {
        "e/t0": (3, 0.2, "", "ended early"),
        "e/t1": (2, 0.1, "accuracy 75.0%", "finished"),
    }
    times = [line["changed_unix_s"] for line in table]
    assert times == sorted(times, reverse=True)
    assert [line["run"] for line in Runs(tmp_path / "e/t0").table()] == ["."]


def test_the_last_score_of_a_long_run_is_found(tmp_path: Path) -> None:
    write_metrics(tmp_path, range(9000))
    finish(tmp_path, 9000)
    write_metrics(tmp_path, range(9000, 9050))
    (line,) = Runs(tmp_path).table()
    assert (line["steps"], line["held_out"]) == (9050, "accuracy 75.0%")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"eval/reward": 0.5, "eval/accuracy": 0.5, "reward/other_max": 1.0}, "reward 0.5"),
        ({"eval/reward": -1.25}, "reward -1.25"),
        ({"eval/loss": 0.6931}, "loss 0.693"),
        ({"reward/mean": 1.0}, ""),
    ],
)
def test_a_score_has_its_name(row: dict[str, float], told: str) -> None:
    assert score_in_words(row, score_name([row])) == told


def test_a_run_that_trains_is_told_from_one_that_died(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0])
    (view, run), states = (RunView(tmp_path), RunFolder(tmp_path)), list[str]()

    def look() -> str:
        states.append(str(view.line()["state"]))
        return view.describe("")[0]

    with file_lock(run.launcher_lock, timeout_s=1):
        look()
        with file_lock(run.trainer_lock, timeout_s=1):
            training = look()
    assert states == ["running", "training"] and look() != training, "nothing but the lock has changed"
    run.summary.write_text('{"is_finished": false}')
    look()
    assert states[2:] == ["ended early", "stopped"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_damaged_run_hides_no_other(tmp_path: Path, name: str) -> None:
    for trial in ("t0", "t1"):
        write_metrics(tmp_path / trial, [0])
    (tmp_path / "t1" / name).write_text("[5\n")
    states = {line["run"]: line["state"] for line in Runs(tmp_path).table()}
    assert states.pop("t0") == "ended early"
    assert states.pop("t1").startswith(f"{tmp_path}/t1/{name} must be as its writer left it")


def test_only_runs_that_were_found_can_be_asked_for(tmp_path: Path) -> None:
    write_metrics(tmp_path / "shown/e/t0", [0])
    write_metrics(tmp_path / "other/t0", [0])
    runs = Runs(tmp_path / "shown")
    runs.view("e/t0")
    for name in ("../other/t0", str(tmp_path / "other/t0"), "e", ""):
        with pytest.raises(ConfigError, match="a run must be below the folder"):
            runs.view(name)


def test_a_run_that_did_not_change_is_not_described_again(tmp_path: Path) -> None:
    view = RunView(write_run(tmp_path / "t0", is_finished=False))
    tag, first = view.describe("")
    assert first is not None and first["title"] == "e / t0"
    assert view.describe(tag) == (tag, None)
    write_metrics(tmp_path / "t0", [2])
    changed, second = view.describe(tag)
    assert changed != tag and second is not None
    (chart,) = [chart for chart in second["charts"] if chart["title"] == "Reward"]
    assert chart["traces"][0]["y"] == [0.0, 0.1, 0.2]


def test_a_trajectory_has_the_text_of_each_token_and_the_state_of_its_prompt(tmp_path: Path) -> None:
    view = RunView(write_run(tmp_path / "t0"))
    write_rows(tmp_path / "t0/rollouts/step_2", [row("0-0", step=2, given="🍎?", sampled="ok", more={
        "token_rewards": [0.0] * 5 + [0.5, -0.5], "num_turns": 2})])  # fmt: skip
    columns = view.rows(-1, 0)
    assert columns["is_complete"] and columns["count"] == 10
    found = view.row(0, 9)
    assert found["texts"] == ["", "", "", "🍎", "?", "o", "k"]
    assert found["tokens"]["token_rewards"] == [0.0] * 5 + [0.5, -0.5]
    assert found["tokens"]["versions"] == [-1] * 5 + [1, 2]
    assert found["facts"]["num_turns"] == 2
    (issue,) = found["prompt"]
    assert (issue["state"], issue["trained_version"], issue["retries"]) == ("trained", 0, ["server"])
    assert [sample["tokens"] for sample in issue["samples"]] == [5]


def test_an_evaluation_is_not_taken_for_the_prompt_of_training_with_its_name(tmp_path: Path) -> None:
    view = RunView(write_run(tmp_path / "t0"))
    assert view.rows(-1, 0)["names"][0] == ("eval_step_0", 1)
    found = view.row(0, 0)
    assert (found["facts"]["prompt_id"], found["prompt"]) == ("0-0", [])


def test_a_tokenizer_that_is_not_here_leaves_ids(tmp_path: Path) -> None:
    view = RunView(write_run(tmp_path / "t0"))
    view.rows(-1, 0)
    (tmp_path / "t0/tokenizer.json").unlink()
    found = view.row(0, 1)
    assert found["texts"] is None and len(found["tokens"]["input_ids"]) == 7
    (saved := tmp_path / "t0/checkpoints/step_4").mkdir(parents=True)
    byte_tokenizer().save(str(saved / "tokenizer.json"))
    assert view.row(0, 1)["texts"] == [*"2 + 2?4"]


@pytest.mark.parametrize("name", ["tokenizer.json", "ledger.sqlite", "rollouts/step_1/_update/0.parquet"])
def test_what_is_damaged_beside_a_trajectory_is_named_and_hides_it_not(tmp_path: Path, name: str) -> None:
    view = RunView(write_run(tmp_path / "t0"))
    (damaged := tmp_path / "t0" / name).parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"PAR1 but no more")
    number = view.rows(-1, 0)["count"] - 1
    found = view.row(0, number)
    assert found["segments"] == [{"given": "2 + 2?"}, {"sampled": "4"}] and len(found["tokens"]["versions"]) == 7
    assert len(found["problems"]) == 1 and str(damaged) in found["problems"][0]
    assert (found["texts"] is None, found["prompt"] == []) == (name[0] == "t", name[0] == "l")
    assert view.frozen(0, [number])["row"][0]["problems"] == found["problems"]


def test_numbers_of_an_update_stand_beside_those_of_its_tokens(tmp_path: Path) -> None:
    view = RunView(write_run(tmp_path / "t0"))
    numbers = {"advantages": np.arange(28, dtype=np.float32), "log_ratio": np.full(28, np.nan, np.float32)}
    update = Update([0, 0, 1, 1], [7] * 4, numbers)
    write_update(tmp_path / "t0/rollouts/step_1/0.parquet", [update], [True, False])
    start = view.rows(-1, 0)["count"] - 4
    tokens = [view.row(0, start + place)["tokens"] for place in range(4)]
    assert tokens[1]["advantages"] == [*map(float, range(7, 14))] and all(map(math.isnan, tokens[1]["log_ratio"]))
    assert "advantages" not in tokens[2] and "logprob_gap" not in tokens[0]
    assert "advantages" not in view.row(0, start - 1)["tokens"], "another step"


def test_prompts_that_were_not_trained_have_a_reason(tmp_path: Path) -> None:
    view = RunView(write_run(tmp_path / "t0"))
    found = view.untrained()
    assert [(one["prompt_id"], one["outcome"], one["sampled"]) for one in found] == [
        ("0-6", "issued", None), ("0-5", "rejected_filter", 5), ("0-4", "failed_reward_timeout", None),
    ]  # fmt: skip
    (issue,) = view.prompt("0-4")
    assert (issue["reason"], issue["latency_s"], issue["samples"]) == ("reward_timeout", 31.0, [])


def test_nothing_of_a_run_is_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "t0")

    def state() -> dict[Path, tuple[int, bytes]]:
        files = [path for path in run.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    view = RunView(run)
    view.describe("")
    view.rows(-1, 0)
    view.row(0, 3)
    view.untrained()
    view.search(0, "4", 0, 9)
    assert state() == before
    shutil.rmtree(run)
    assert not view.exists()

"""What a replay refuses; `test_end_to_end.py` replays steps of real runs."""

import json
import shutil
from pathlib import Path

import pytest
from testing_rollouts import write_rows

from arealite.api.run_folder import RunFolder
from arealite.cli.main import main
from arealite.trainer.stats_logger import write_config

COMMAND = json.dumps({"entry": __file__, "argv": []})
CONFIG = "{experiment_name: e, trial_name: t, lr: 1}"


def test_what_a_folder_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint() -> str:
        assert main(["replay", str(tmp_path), "--step", "0"]) == 2
        return capsys.readouterr().err

    assert "a run folder must hold run.json" in complaint()
    (tmp_path / "run.json").write_text(COMMAND)
    assert "a run folder must hold config.yaml" in complaint()
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert "must hold steps 0 to 0: got no step_0" in complaint()
    write_rows(tmp_path / "rollouts" / "step_0", [{"prompt_id": "0-0", "loss_mask": [1]}, {"prompt_id": "0-1"}])
    assert "must hold all tokens of steps 0 to 0: got only some of those of 0. Choose another step" in complaint()
    shutil.rmtree(tmp_path / "rollouts")
    write_rows(tmp_path / "rollouts" / "step_0", [{"prompt_id": "0-0", "loss_mask": [1]}])
    assert "must hold the fingerprint of version 1: got none" in complaint()


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("run.json", "{", "JSONDecodeError"),
        ("run.json", "[]", "TypeError: a list in place of an object"),
        ("run.json", '{"entry": [5]}', "ValidationError"),
        ("config.yaml", "x: *y", "ComposerError"),
        ("config.yaml", "experiment_name: e", "ValidationError"),
        ("config.yaml", "{experiment_name: e, trial_name: ../../etc}", "ValidationError"),
        ("weights.jsonl", "{}\n", "KeyError: 'version'"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, cause: str
) -> None:
    write_rows(tmp_path / "rollouts" / "step_0", [{"prompt_id": "0-0", "loss_mask": [1]}])
    (tmp_path / "run.json").write_text(COMMAND)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / name).write_text(content)
    assert main(["replay", str(tmp_path), "--step", "0"]) == 2
    told = f"FileError: {tmp_path / name} must be as its writer left it: got {cause}"
    assert capsys.readouterr().err.startswith(told)


def test_relative_paths_count_from_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started_in, run = tmp_path / "started", tmp_path / "runs/e/t"
    (started_in / "tiny").mkdir(parents=True)
    write_rows(run / "rollouts" / "step_0", [{"prompt_id": "0-0", "loss_mask": [1]}])
    (run / "weights.jsonl").write_text('{"version": 1, "fingerprint": "ab", "threads": 1}\n')
    (run / "config.yaml").write_text(
        "{experiment_name: e, trial_name: t, allocation_mode: d1, cluster: {n_gpus_per_node: 0}, actor: {path: tiny},"
        " train_dataset: {path: gsm8k}, rollout: {server_addrs: ['127.0.0.1:1']}}"
    )
    (started_in / "entry.py").write_text("import os\nprint('is there:', os.path.isdir('tiny'))\n")
    record = {"entry": str(started_in / "entry.py"), "argv": [], "started_in": str(started_in)}
    (run / "run.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "runs/e/t", "--step", "0"]) == 0
    assert "is there: True" in capfd.readouterr().out and Path.cwd() == tmp_path


def test_steps_before_and_after_a_change_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 0 and 1 have one config, later ones another: a replay can't start in one and end in the other."""
    write_config(RunFolder(tmp_path), CONFIG, start_step=0)
    write_config(RunFolder(tmp_path), CONFIG.replace("1", "2"), start_step=2)
    (tmp_path / "run.json").write_text(COMMAND)
    assert main(["replay", str(tmp_path), "--step", "3"]) == 2
    error = capsys.readouterr().err
    assert "step 3 must have a checkpoint of its own configuration to start from: got none since" in error
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "must hold steps 0 to 1: got no step_0" in capsys.readouterr().err

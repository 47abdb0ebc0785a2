"""Steps of asynchronous runs, executed again from what their folders hold."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.run_folder import RunFolder
from arealite.cli.main import main
from arealite.cli.tiny_model import write_tiny_model
from arealite.trainer.records import write_config
from arealite.weights.log import read_weights

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "arealite"
pytestmark = pytest.mark.xdist_group("launcher")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "VIRTUAL_ENV")}
    env["PYTHONPATH"] = str(REPOSITORY)
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd="/", env=env, capture_output=True, text=True, timeout=240, check=False
    )


def run(model: Path, fileroot: Path, allocation_mode: str, num_steps: int, *overrides: str) -> Path:
    """Run asynchronous GRPO in which every answer is wrong and pushed away, so that weights move in each step."""
    finished = program(
        *("arealite.launcher.local", str(EXAMPLES / "gsm8k_grpo.py")),
        *("--config", str(EXAMPLES / "configs" / "gsm8k_grpo_cpu.yaml"), f"actor.path={model}"),
        *(f"cluster.fileroot={fileroot}", "experiment_name=e", "trial_name=t", f"total_train_steps={num_steps}"),
        *(f"allocation_mode={allocation_mode}", "train_dataset.path=story?train=200&test=10", "valid_dataset=null"),
        *(
            "train_dataset.batch_size=6",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=24",
            "evaluator.freq_steps=null",
        ),
        *("rollout.max_concurrent_rollouts=12", "actor.adv_norm=false", "actor.group_reward_norm=false"),
        *("actor.reward_bias=-0.5", *overrides),
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return fileroot / "e" / "t"


def replay(folder: Path, step: int) -> tuple[int, str]:
    finished = program("arealite.cli.main", "replay", str(folder), "--step", str(step))
    return finished.returncode, finished.stdout + finished.stderr


def tamper(folder: Path, step: int) -> None:
    """Change the reward of one sample."""
    path = folder / "rollouts" / f"step_{step}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[7]["reward"] += 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_from_the_initial_model(model: Path, tmp_path: Path) -> None:
    folder = run(model, tmp_path, "lite.d1p1t1+d1p1t1", 3)
    weights = read_weights(folder)
    assert sorted(weights) == [0, 1, 2, 3] and len(set(weights.values())) == 4
    before = sorted(folder.rglob("*"))
    status, out = replay(folder, 1)
    assert status == 0, out
    assert f"step 1 replayed: weights of version 2 are bit-identical (fingerprint {weights[2]})" in out
    assert sorted(folder.rglob("*")) == before


def test_the_first_step_that_differs_is_named(model: Path, tmp_path: Path) -> None:
    """On two ranks, from a checkpoint: neither are earlier rollouts needed nor does step 2 differ."""
    folder = run(model, tmp_path, "lite.d1p1t1+d2p1t1", 4, "recover.mode=auto", "recover.freq_steps=2")
    (folder / "rollouts" / "step_0.jsonl").unlink()
    tamper(folder, 3)
    status, out = replay(folder, 3)
    assert status == 1, out
    assert "going on after step 1" in out
    expected = read_weights(folder)[4]
    differs = rf"step 3 replayed: weights of version 4 DIFFER: .* {expected}, these [0-9a-f]{{16}}\n"
    assert re.search(differs, out), out


def test_what_a_folder_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint() -> str:
        assert main(["replay", str(tmp_path), "--step", "0"]) == 2
        return capsys.readouterr().err

    assert "a run folder must hold run.json" in complaint()
    (tmp_path / "run.json").write_text("{}")
    assert "a run folder must hold config.yaml" in complaint()
    (tmp_path / "config.yaml").write_text("{}")
    assert "must hold steps 0 to 0: got no step_0.jsonl" in complaint()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_0.jsonl").write_text("")
    assert "must hold the fingerprint of version 1: got none" in complaint()


def test_steps_before_and_after_a_change_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 0 and 1 have one config, later ones another: a replay can't start in one and end in the other."""
    write_config(RunFolder(tmp_path), "lr: 1", start_step=0)
    write_config(RunFolder(tmp_path), "lr: 2", start_step=2)
    (tmp_path / "run.json").write_text("{}")
    assert main(["replay", str(tmp_path), "--step", "3"]) == 2
    error = capsys.readouterr().err
    assert "step 3 must have a checkpoint of its own configuration to start from: got none since" in error
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "must hold steps 0 to 1: got no step_0.jsonl" in capsys.readouterr().err

"""The examples of agents, on a tiny model, as their command says, with less of everything."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testing_metrics import undocumented
from testing_quickstart import WORD_PROBLEMS, write_tiny_model

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "agents"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


def run(name: str, data: str, model: Path, fileroot: Path) -> list[dict[str, Any]]:
    """Run a step of an example and return its metrics."""
    words = [
        *(
            "-m",
            "arealite.launcher.local",
            str(EXAMPLES / f"{name}.py"),
            "--config",
            str(EXAMPLES / "configs/cpu.yaml"),
        ),
        *(f"actor.path={model}", f"cluster.fileroot={fileroot}", f"experiment_name={name}", "total_train_steps=1"),
        *(
            f"train_dataset.path={data}",
            "train_dataset.batch_size=2",
            "gconfig.n_samples=2",
            "gconfig.max_new_tokens=12",
        ),
        *("valid_dataset.max_rows=2", "launcher.preflight=false", "recover.mode=disabled"),
    ]
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    env["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run([sys.executable, *words], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (fileroot / name / "trial0/metrics.jsonl").read_text().splitlines()]
    assert not undocumented({key for row in rows for key in row})
    lines = [json.loads(line) for line in (fileroot / name / "trial0/rollouts/step_0.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == [0, 1, 0, 1]
    assert not [key for key in rows[0] if key.startswith("rollout/failed_")]
    return [*rows, *lines]


def test_multi_turn_math_tries_twice(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("multi_turn_math", f"{WORD_PROBLEMS}?train=20&test=2", model, tmp_path)
    assert first["workflow/num_turns"] == 2 and [[*part] for part in line["segments"]] == [["given"], ["sampled"]] * 2


def test_countdown_tries_three_times(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("countdown", f"{EXAMPLES / 'countdown_problems.py'}:rows?train=20&test=2", model, tmp_path)
    assert first["workflow/num_turns"] == 3 and "try again" in line["segments"][2]["given"]


def test_the_frozen_lake_is_walked(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("frozen_lake", f"{EXAMPLES / 'frozen_lake.py'}:rows?train=20&test=2", model, tmp_path)
    assert first["workflow/num_turns"] >= 1 and first["workflow/parse_errors"] > 0
    assert "holes" in line["segments"][0]["given"] or "\nP" in line["segments"][0]["given"]


def test_the_search_agent_is_told_its_tool(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("search", f"{EXAMPLES / 'search.py'}:rows?train=20&test=2", model, tmp_path)
    assert first["workflow/tool_calls"] == 0, "of which random weights know nothing"
    assert '"name": "search"' in line["segments"][0]["given"]


def test_math_with_python(model: Path, tmp_path: Path) -> None:
    *_, line = run("python_math", f"{WORD_PROBLEMS}?train=20&test=2", model, tmp_path)
    assert '"name": "python_tool"' in line["segments"][0]["given"]

"""The examples of agents, on a tiny model, as their command says, with less of everything."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.processes import REPOSITORY, environment, guarded, wait_until
from testing_ports import held_port
from testing_quickstart import WORD_PROBLEMS
from testing_rollouts import stored_rows
from testing_runs import launch, metrics

from arealite.rollout.account.audit import audit

EXAMPLES = REPOSITORY / "examples" / "agents"
pytestmark = pytest.mark.slow


def run(name: str, data: str, model: Path, fileroot: Path) -> list[dict[str, Any]]:
    """Run a step of an example and return its metrics."""
    launch(
        *(EXAMPLES / f"{name}.py", EXAMPLES / "configs/cpu.yaml"),
        *(f"actor.path={model}", f"cluster.fileroot={fileroot}"),
        *(f"experiment_name={name}", "total_train_steps=1", f"train_dataset.path={data}", "train_dataset.batch_size=2"),
        *("gconfig.n_samples=2", "gconfig.max_new_tokens=12", "valid_dataset.max_rows=2"),
        *("launcher.preflight=false", "recover.mode=disabled"),
    )
    rows = metrics(fileroot / name / "trial0")
    lines = stored_rows(fileroot / name / "trial0/rollouts/step_0")
    assert [line["sample"] for line in lines] == [0, 1, 0, 1]
    assert not [key for key in rows[0] if key.startswith("rollout/failed_")]
    return [*rows, *lines]


def test_multi_turn_math_tries_twice(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("multi_turn_math", f"{WORD_PROBLEMS}?train=20&test=2", model, tmp_path)
    assert first["workflow/num_turns"] == 2 and [[*part] for part in line["segments"]] == [["given"], ["sampled"]] * 2


@pytest.mark.long
def test_countdown_tries_three_times(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("countdown", f"{EXAMPLES / 'countdown_problems.py'}:rows?train=20&test=2", model, tmp_path)
    assert first["workflow/num_turns"] == 3 and "try again" in line["segments"][2]["given"]


@pytest.mark.long
def test_the_frozen_lake_is_walked(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("frozen_lake", f"{EXAMPLES / 'frozen_lake.py'}:rows?train=20&test=2", model, tmp_path)
    assert first["workflow/num_turns"] >= 1 and first["workflow/parse_errors"] > 0
    assert "holes" in line["segments"][0]["given"] or "\nP" in line["segments"][0]["given"]


@pytest.mark.long
def test_the_search_agent_is_told_its_tool(model: Path, tmp_path: Path) -> None:
    first, *_, line = run("search", f"{EXAMPLES / 'search.py'}:rows?train=20&test=2", model, tmp_path)
    assert first["workflow/tool_calls"] == 0, "of which random weights know nothing"
    assert '"name": "search"' in line["segments"][0]["given"]


@pytest.mark.long
def test_math_with_python(model: Path, tmp_path: Path) -> None:
    *_, line = run("python_math", f"{WORD_PROBLEMS}?train=20&test=2", model, tmp_path)
    assert '"name": "python_tool"' in line["segments"][0]["given"]


def test_players_open_sessions_until_the_trainer_has_gone(model: Path, tmp_path: Path) -> None:
    """The example's trainer and its clients, each a process."""
    port, script, folder = held_port(), str(EXAMPLES / "online.py"), tmp_path / "online/trial0"
    config = ["--config", str(EXAMPLES / "configs/online.yaml"), f"actor.path={model}", f"cluster.fileroot={tmp_path}"]
    smaller = ["train_dataset.batch_size=2", "gconfig.max_new_tokens=12", "total_train_steps=2"]
    others = [f"agent.online.port={port}", "launcher.preflight=false", "recover.mode=disabled"]
    words = [sys.executable, "-m", "arealite.launcher.local", script, *config, *smaller, *others]
    env, log = environment() | {"AREALITE_SECRET": "a secret of the test"}, tmp_path / "log"
    play = [sys.executable, script, "play", f"http://127.0.0.1:{port}"]
    with guarded(words, log, env=env) as trainer:
        wait_until("a trainer that listens", lambda: is_listening(port), 300, trainer)
        with guarded(play, tmp_path / "player", env=env) as player:
            trainer.expect_done(300)
            player.expect_done(60)
    assert player.text() == "the trainer has gone\n"
    rows = metrics(folder)
    assert rows[-1]["agent/sessions_ended"] >= 8 and rows[-1]["staleness/max"] <= 2
    assert audit(folder).is_clean and audit(folder).trained == 4


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

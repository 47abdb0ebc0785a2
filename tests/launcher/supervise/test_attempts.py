"""What happens between two attempts of a run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.launcher.place.local import LocalPlace
from arealite.launcher.plan.plan import Plan, Run, checked_plan, make_plan
from arealite.launcher.supervise.run import launch
from arealite.utils.files import file_lock

CONFIG = Path(__file__).parents[3] / "examples" / "arealite" / "configs" / "gsm8k_sft.yaml"


def run_in(folder: Path, *more: str) -> Run:
    overrides = [f"cluster.fileroot={folder}", "cluster.n_gpus_per_node=0", "allocation_mode=d1", "recover.mode=auto"]
    config = load_run_config(["--config", str(CONFIG), *overrides, "recover.freq_steps=1", *more])
    return Run(config, make_plan(config), folder / "entry.py", [])


class AskedPlace(LocalPlace):
    """Gets SIGTERM while it asks its nodes, and returns once the launcher has taken it."""

    def __init__(self, answer: bool) -> None:
        self.num_opened, self._answer = 0, answer

    def open(self, config: BaseExperimentConfig, plan: Plan, log: Callable[[str], None]) -> None:
        super().open(config, plan, log)
        self.num_opened, self._loop = self.num_opened + 1, asyncio.get_running_loop()

    def nodes_answer(self) -> bool:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
        return self._answer


@pytest.mark.parametrize("answer", [True, False])
def test_a_signal_while_the_nodes_are_asked_ends_the_run(tmp_path: Path, answer: bool) -> None:
    """On Slurm this takes as long as a node may be silent, and a lost one makes the job start again."""
    (tmp_path / "entry.py").write_text("raise SystemExit(7)")
    place = AskedPlace(answer)
    assert launch(run_in(tmp_path), place, is_checked=True) == 143
    assert place.num_opened == 1


def test_a_resume_without_a_checkpoint_starts_nothing(tmp_path: Path) -> None:
    run = run_in(tmp_path, "recover.mode=resume")
    with pytest.raises(ConfigError, match=r"must hold a checkpoint for recover.mode=resume: got none"):
        launch(run, LocalPlace(), is_checked=True)
    assert not run.folder.path.exists()


def test_a_run_can_not_start_from_a_model_that_it_would_move_aside(tmp_path: Path) -> None:
    model = run_in(tmp_path).folder.path / "checkpoints" / "step_3"
    model.mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"model.path must lie outside of the folder of the run: got {model}"):
        checked_plan(run_in(tmp_path, f"model.path={model}").config)


def test_what_a_trainer_started_by_hand_has_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arealite.launcher.supervise.run._LOCK_TIMEOUT_S", 0.1)
    run = run_in(tmp_path)
    with file_lock(run.folder.trainer_lock, timeout_s=1.0):
        run.folder.metrics.write_text("{}\n")
        with pytest.raises(ConfigError, match=f"must belong to one run at a time: got process {os.getpid()} on"):
            launch(run, LocalPlace(), is_checked=True)
    assert run.folder.metrics.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", ""),
        ("config.yaml", "- a list"),
        ("config.yaml", "{"),
        ("config.yaml", "\xff"),
        ("summary.json", "{"),
    ],
)
def test_a_damaged_file_of_a_finished_run_is_named(tmp_path: Path, name: str, text: str) -> None:
    run = run_in(tmp_path)
    run.folder.path.mkdir(parents=True)
    run.folder.config.write_text("{}")
    run.folder.summary.write_text('{"is_finished": true}')
    (run.folder.path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=f"^{run.folder.path / name} must be as its writer left it: got "):
        launch(run, LocalPlace(), is_checked=True)

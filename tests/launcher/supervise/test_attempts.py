"""What happens between two attempts of a run."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.launcher.place.local import LocalPlace
from arealite.launcher.plan.plan import Plan, Run, make_plan
from arealite.launcher.supervise.run import launch

CONFIG = Path(__file__).parents[3] / "examples" / "arealite" / "configs" / "gsm8k_sft.yaml"


def run_in(folder: Path) -> Run:
    overrides = [f"cluster.fileroot={folder}", "cluster.n_gpus_per_node=0", "allocation_mode=d1"]
    config = load_run_config(["--config", str(CONFIG), *overrides, "recover.mode=auto", "recover.freq_steps=1"])
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

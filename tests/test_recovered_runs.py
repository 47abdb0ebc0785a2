"""Whole runs that are killed with SIGKILL and started again: they end as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testing_quickstart import WORD_PROBLEMS, write_tiny_model

from arealite.utils.processes import kill_tree

EXAMPLES = Path(__file__).parents[1] / "examples" / "arealite"
STEPS, BATCH, GROUP = 4, 4, 2
DEADLINE_S = 400
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


class Run:
    """Synchronous, deterministic GRPO. All rewards count as -0.5, so every step changes the weights."""

    def __init__(self, model: Path, fileroot: Path, allocation: str) -> None:
        self.folder = fileroot / "recovered" / "t"
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._arguments = [
            *(f"actor.path={model}", f"cluster.fileroot={fileroot}", f"allocation_mode={allocation}"),
            *("experiment_name=recovered", "trial_name=t", "recover.mode=auto", "recover.freq_steps=2"),
            *("async_training=false", "lite.deterministic=true", "launcher.trainer_threads=1"),
            "launcher.preflight=false",
            *(
                "actor.group_reward_norm=false",
                "actor.reward_bias=-0.5",
                f"train_dataset.path={WORD_PROBLEMS}?train=40&test=4",
            ),
            *(f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}", "evaluator.freq_steps=3"),
            *(f"gconfig.n_samples={GROUP}", "gconfig.max_new_tokens=12"),
        ]

    def start(self, *overrides: str) -> subprocess.Popen[bytes]:
        """Start the launcher."""
        command = [sys.executable, "-m", "arealite.launcher.local", EXAMPLES / "gsm8k_grpo.py"]
        command += ["--config", EXAMPLES / "configs" / "gsm8k_grpo_cpu.yaml", *self._arguments, *overrides]
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / "output.txt").open("ab") as output:
            self.launchers.append(
                subprocess.Popen(command, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
        return self.launchers[-1]

    def finish(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.wait(DEADLINE_S) == 0, self.output

    @property
    def output(self) -> str:
        return (self.folder.parent / "output.txt").read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_row(self, step: int, launcher: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while all(row["step"] != step for row in self.rows):
            assert launcher.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def prompts(self, step: int) -> list[str]:
        lines = (self.folder / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt_id"] for line in lines]


@pytest.fixture
def make_run(model: Path, tmp_path: Path) -> Iterator[Callable[[str, str], Run]]:
    """Return a function that makes a run in a folder of its own; nothing of it survives the test."""
    runs: list[Run] = []

    def make(name: str, allocation: str) -> Run:
        runs.append(Run(model, tmp_path / name, allocation))
        return runs[-1]

    yield make
    for run in runs:
        for launcher in run.launchers:
            kill_tree(launcher.pid)


def assert_same_run(found: Run, expected: Run) -> None:
    """Weights, optimizer, generators, prompts and every metric that does not measure time."""
    assert [row["step"] for row in found.rows] == list(range(STEPS + 1))
    for row, other in zip(found.rows, expected.rows):
        keys = {key for key in row.keys() | other.keys() if not key.startswith(("time/", "perf/"))}
        assert {key: row.get(key) for key in keys} == {key: other.get(key) for key in keys}
    for step in range(STEPS):
        assert found.prompts(step) == expected.prompts(step)
    files = [f"checkpoints/step_{STEPS - 1}/model.safetensors"]
    files += [f"recover/{path.parent.name}/{path.name}" for path in (expected.folder / "recover").glob("*/__*")]
    files += [f"recover/{path.parent.name}/{path.name}" for path in (expected.folder / "recover").glob("*/rng_*")]
    assert len(files) >= 5
    for name in files:
        assert (found.folder / name).read_bytes() == (expected.folder / name).read_bytes(), name
    assert all(row["optim/grad_norm"] > 0 for row in expected.rows[:STEPS]), "there must be something to get wrong"


def test_a_killed_launcher_and_then_two_ranks(make_run: Callable[[str, str], Run]) -> None:
    """The user starts the same command again; later the run goes on with more ranks."""
    whole, cut = (make_run(name, "lite.d1p1t1+d1p1t1") for name in ("whole", "cut"))
    whole.finish(whole.start())
    launcher = cut.start()
    cut.wait_for_row(2, launcher)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(120)
    cut.finish(cut.start())
    assert "resuming after step 1 from " in cut.output and "restart" not in cut.output
    assert_same_run(cut, whole)

    cut.finish(cut.start("allocation_mode=lite.d1p1t1+d2p1t1", f"total_train_steps={STEPS + 2}"))
    assert f"resuming after step {STEPS - 1} from " in cut.output
    assert [row["step"] for row in cut.rows] == list(range(STEPS + 3))
    prompts = [prompt for step in range(STEPS + 2) for prompt in cut.prompts(step)]
    assert len(prompts) == GROUP * len(set(prompts)) == GROUP * BATCH * (STEPS + 2), "none lost, none repeated"
    assert [row["rollout/accepted"] for row in cut.rows[: STEPS + 2]] == [BATCH * (n + 1) for n in range(STEPS + 2)]


def test_a_killed_rank_of_two(make_run: Callable[[str, str], Run]) -> None:
    """The launcher starts the run again."""
    whole, cut = (make_run(name, "lite.d1p1t1+d2p1t1") for name in ("whole", "cut"))
    whole.finish(whole.start())
    launcher = cut.start()
    cut.wait_for_row(2, launcher)
    os.kill(int((cut.folder / ".trainer.lock").read_text().split()[0]), signal.SIGKILL)
    cut.finish(launcher)
    assert "restart 1 of 3, because trainer-0 failed with exit status 137 (SIGKILL)" in cut.output
    assert_same_run(cut, whole)

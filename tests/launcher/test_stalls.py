"""Five planted stalls under the real launcher, at once: each verdict names its culprit by pid, line, rank or server.

With RECORD_STALLS=<file> the verdicts are written there (they are shown in `docs/stalls.md`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from testing_processes import spawn
from tiny_models import save_qwen3

from arealite.utils.processes import kill_tree, wait_gone

HERE = Path(__file__).parent
PROGRAM = HERE / "planted_stalls.py"
DEADLINE_S = 1200
pytestmark = pytest.mark.slow

NO_SERVER = ("allocation_mode=d1", "rollout.server_addrs=[127.0.0.1:9]")
TWO_RANKS = ("allocation_mode=d2", "rollout.server_addrs=[127.0.0.1:9]")
STALLS = {
    "stopped_server": ("allocation_mode=lite.d1+d1",),
    "absent_rank": TWO_RANKS,
    "reward_deadlock": NO_SERVER,
    "awaits_for_ever": NO_SERVER,
    "blocking_sleep": NO_SERVER,
}


@dataclass
class Stall:
    """What became of one run."""

    status: int
    output: str
    folder: Path

    @property
    def verdict(self) -> str:
        return next(line for line in self.output.splitlines() if "stalled:" in line)

    @property
    def evidence(self) -> str:
        (path,) = self.folder.glob("stall_*.txt")
        return path.read_text()

    def pid_of(self, name: str) -> int:
        match = re.search(rf"^{name} \(pid (\d+)\)", self.evidence, re.MULTILINE)
        assert match is not None, self.evidence
        return int(match[1])


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stall]:
    folder = tmp_path_factory.mktemp("stalls")
    model = save_qwen3(folder / "model", seed=1)
    config = {
        "experiment_name": "exp",
        "cluster": {"n_gpus_per_node": 0, "fileroot": str(folder)},
        "train_dataset": {"path": "gsm8k", "batch_size": 8},
        "gconfig": {"max_new_tokens": 100},
        "actor": {"path": model},
        "launcher": {"stall_timeout": 20, "preflight": False},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    runs: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, overrides in STALLS.items():
            runs[name] = _start(folder, name, overrides)
        statuses = {name: run.wait(DEADLINE_S) for name, run in runs.items()}
    finally:
        for run in runs.values():
            kill_tree(run.pid)
    stalls = {
        name: Stall(status, (folder / f"{name}.txt").read_text(), folder / "exp" / name)
        for name, status in statuses.items()
    }
    if os.environ.get("RECORD_STALLS"):
        Path(os.environ["RECORD_STALLS"]).write_text(
            "\n".join(f"## {n}\n{stall.output}" for n, stall in stalls.items())
        )
    return stalls


def _start(folder: Path, name: str, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    program = "import os, sys; os.environ['LAUNCHER'] = str(os.getpid()); from arealite.launcher.local import main; "
    command = [sys.executable, "-c", program + "sys.exit(main(sys.argv[1:]))", PROGRAM, "--config"]
    command += [folder / "config.yaml", f"trial_name={name}", f"cluster.fileroot={folder}", *overrides]
    with (folder / f"{name}.txt").open("wb") as output:
        environment = os.environ | {"PYTHONPATH": paths, "PLANTED": name, "OMP_NUM_THREADS": "1"}
        return spawn(command, env=environment, stdout=output, stderr=output)


def guilty_line(name: str) -> str:
    """Return `file:line` of a `# guilty` comment."""
    for path in (PROGRAM, HERE / "planted_episodes.py", HERE / "planted_reward.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.endswith(f"# guilty: {name}"):
                return f"{path}:{number} in "
    raise AssertionError(name)


def test_server_stopped_by_a_signal(stalls):
    stall = stalls["stopped_server"]
    assert stall.status == 4, stall.output
    pid = stall.pid_of("server-0")
    assert f" s: server-0 (pid {pid}) is stopped by a signal (state T), for " in stall.verdict
    assert f"    Continue it with kill -CONT {pid}.\n" in stall.output
    assert "RolloutExecutor._train_now" in stall.output, "the console names the process that waits for it"
    assert wait_gone([pid], timeout_s=120) == set(), "a stopped process is ended as well"


def test_rank_that_does_not_enter_a_collective(stalls):
    stall = stalls["absent_rank"]
    assert stall.status == 4, stall.output
    culprit = f"trainer-1 (pid {stall.pid_of('trainer-1')})"
    assert f" s: {culprit} runs at {guilty_line('absent_rank')}absent_rank, for " in stall.verdict
    assert f"trainer-0 (pid {stall.pid_of('trainer-0')}) waits for a sum over all ranks" in stall.output


def test_deadlocked_reward(stalls):
    stall = stalls["reward_deadlock"]
    assert stall.status == 4, stall.output
    assert " s: reward function deadlocked_reward (pid " in stall.verdict
    assert f"has not returned at {guilty_line('reward_deadlock')}deadlocked_reward" in stall.verdict


def test_episode_that_awaits_for_ever(stalls):
    stall = stalls["awaits_for_ever"]
    assert stall.status == 4, stall.output
    culprit = f"episode 0-5 in trainer-0 (pid {stall.pid_of('trainer-0')})"
    assert f" s: {culprit} awaits at {guilty_line('awaits_for_ever')}Awaiting.arun_episode, for " in stall.verdict


def test_blocking_call_in_a_workflow(stalls):
    stall = stalls["blocking_sleep"]
    assert stall.status == 4, stall.output
    line = guilty_line("blocking_sleep")
    warning = rf"{re.escape(line)}Blocking\.arun_episode blocks the rollout loop for \d+\.\d s"
    assert re.search(warning, stall.output), "the warning comes while it blocks"
    culprit = f"trainer-0 (pid {stall.pid_of('trainer-0')})"
    assert f" s: {culprit} blocks the event loop of episodes at {line}Blocking.arun_episode, for " in stall.verdict


def test_nothing_is_left(stalls):
    for stall in stalls.values():
        assert {path.suffix for path in (stall.folder / "logs").iterdir()} == {".log"}

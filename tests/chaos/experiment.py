"""The run that faults are injected into: a tiny model, a dozen asynchronous steps, real processes, a marker on each.

The run's temporary folder is its own, so that whatever is left in it was left by the run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.processes import MARKER, REPOSITORY, Program, environment
from testing_processes import spawn

ENTRY = REPOSITORY / "examples" / "arealite" / "gsm8k_grpo.py"
AGENT_ENTRY = Path(__file__).with_name("agent_run.py")
WORD_PROBLEMS = f"{REPOSITORY / 'examples' / 'quickstart' / 'word_problems.py'}:rows"
CONFIG = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
STEPS = 12


@dataclass(frozen=True)
class Experiment:
    """One run: what it is and how to start it."""

    folder: Path
    """Of everything about the run; its name is the marker."""
    model: Path
    allocation: str
    server_addrs: tuple[str, ...] = ()
    steps: int = STEPS
    batch_size: int = 6
    group_size: int = 4
    bound: int = 2
    retries: int = 2
    weight_update: Literal["broadcast", "disk"] = "broadcast"
    checkpoint_steps: int = 1
    entry: Path = ENTRY
    reward: str = "arealite.reward:gsm8k_reward_fn"
    num_idle: int = 0
    """Prompts that may wait beside those: batches are pulled as a whole, also to replace a few that were dropped."""
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "chaos" / "run"

    @property
    def max_pending(self) -> int:
        """Return how many prompts a run pulls ahead of those it trains on."""
        return (self.bound + 1) * self.batch_size + self.num_idle

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of everything that belongs to the run."""
        return environment() | {MARKER: str(self.folder), "TMPDIR": str(self.temporary)}

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of a launcher: entry script, config, overrides."""
        overrides = {
            "actor.path": self.model,
            "reward": self.reward,
            "cluster.fileroot": self.folder / "runs",
            "experiment_name": "chaos",
            "trial_name": "run",
            "allocation_mode": self.allocation,
            "total_train_steps": self.steps,
            "gconfig.n_samples": self.group_size,
            "gconfig.max_new_tokens": 24,
            "train_dataset.path": f"{WORD_PROBLEMS}?train=200&test=10",
            "train_dataset.batch_size": self.batch_size,
            "evaluator.freq_steps": 5,
            "rollout.max_concurrent_rollouts": 2 * self.batch_size,
            "rollout.max_head_offpolicyness": self.bound,
            "rollout.server_addrs": f"[{','.join(self.server_addrs)}]",
            "rollout.weight_update": self.weight_update,
            "rollout.weight_update_timeout": 60,
            "rollout.setup_timeout": 300,
            "rollout.episode_timeout": 120,
            "rollout.request_timeout": 30,
            "actor.baseline": "none",
            "actor.reward_bias": -0.5,  # a random model earns nothing, and its weights would never change
            "recover.mode": "auto",
            "recover.freq_steps": self.checkpoint_steps,
            "recover.retries": self.retries,
            "launcher.stall_timeout": 300,
            "launcher.preflight": False,
            **self.overrides,
        }
        return [str(self.entry), "--config", str(CONFIG), *(f"{k}={v}" for k, v in overrides.items())]

    def launch(self, number: int = 0, *overrides: str, module: str = "arealite.launcher.local", **env: str) -> Launcher:
        """Start a launcher for the `number`-th time."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        output = self.folder / f"launcher-{number}.txt"
        with output.open("wb") as file:
            command = [sys.executable, "-m", module, *self.arguments, *overrides]
            process = spawn(command, env=self.environment | env, cwd=self.folder, stdout=file, stderr=file)
        return Launcher("the launcher", process, output)


class Launcher(Program):
    """A started launcher."""

    def causes(self) -> list[str]:
        """Return why it has restarted the run, and why it ended if that was a failure."""
        lines = self.text().splitlines()
        causes = [line.partition("because ")[2] for line in lines if "restart " in line and " because " in line]
        if self.process.returncode == -signal.SIGKILL:
            causes.append("the launcher was killed")
        elif self.process.returncode != 0:
            causes.append(next((line for line in reversed(lines) if "stopping everything" in line), "no word"))
        return causes

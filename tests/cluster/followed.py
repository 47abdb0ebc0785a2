"""What runs on clusters share: the tiny experiment under some launcher, followed to its end, and what became of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos.experiment import Experiment, Launcher
from chaos.kills import Outcome
from chaos.promises import Verdict, judge
from chaos.victims import marked
from testing_processes import spawn

from arealite.utils.processes import kill_tree
from cluster import paced
from cluster.common import last_step

PACED = Path(paced.__file__)
"""Entry of experiments that train as many steps as they are allowed (see `ClusterRun.allow`)."""
STEP_S = 300.0
"""Timeout of what the steps of `ClusterRun.do` take together."""
_LOOK_S = 0.1
_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.monotonic() - _STARTED:6.1f} s  {text}", flush=True)


def tell_result(result: dict[str, Any], verdicts: list[Verdict]) -> int:
    """Print the last line of a suite, and return its exit status."""
    broken = [text for verdict in verdicts for text in verdict.broken]
    for text in broken:
        say(f"BROKEN {text}")
    sums = {"lost": sum(one.lost for one in verdicts), "repeated": sum(one.repeated for one in verdicts)}
    seconds = round(time.monotonic() - _STARTED)
    print(f"RESULT {json.dumps({**result, **sums, 'broken': len(broken), 'seconds': seconds})}")
    return 1 if broken else 0


@dataclass
class ClusterRun:
    """A run of the experiment by a launcher, and what was done to it."""

    experiment: Experiment
    launcher: Launcher
    outcome: Outcome = field(default_factory=Outcome)

    @classmethod
    @contextlib.contextmanager
    def start(cls, experiment: Experiment, module: str, *overrides: str, **env: str) -> Iterator[ClusterRun]:
        """Start `python -m <module>` on the experiment, and kill it if it still is there at last."""
        experiment.temporary.mkdir(parents=True, exist_ok=True)
        paced.allow(experiment.folder, 1)
        output = experiment.folder / "launcher.txt"
        command = [sys.executable, "-m", module, *experiment.arguments, *overrides]
        with output.open("wb") as file:
            process = spawn(
                command, env=experiment.environment | env, cwd=experiment.folder, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            yield cls(experiment, Launcher(process, output))
        finally:
            kill_tree(process.pid)
            process.wait(120)

    @property
    def steps(self) -> int:
        """Return how many steps are told so far."""
        path = self.experiment.run_folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the run, wherever they are."""
        found = []
        for pid in marked(self.experiment.folder):
            try:
                found.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
        return found

    def process(self, *words: str) -> psutil.Process:
        """Return the outermost process whose command line has these words."""
        found = [one for one in self.processes if set(words) <= set(_command(one))]
        return min(found, key=lambda one: len(one.parents()))

    def said(self, text: str) -> int:
        """Return how many lines of the launcher have this text."""
        return sum(text in line for line in self.launcher.output.read_text(errors="replace").splitlines())

    def wait(self, what: str, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait for something that must come true while the launcher runs."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if self.launcher.process.poll() is not None or time.monotonic() > deadline:
                sys.stderr.write(self.launcher.output.read_text(errors="replace")[-5000:])
                raise TimeoutError(f"{what} must come within {timeout_s:g} s while the launcher runs: it did not")
            time.sleep(_LOOK_S)

    def allow(self, num_steps: int) -> None:
        """Let a paced run do more steps than it has reported."""
        paced.allow(self.experiment.folder, last_step(self.experiment) + 1 + num_steps)

    def do(self, num_steps: int) -> None:
        """Let a paced run do more steps, and wait for them."""
        last = last_step(self.experiment) + num_steps
        self.allow(num_steps)
        self.wait(f"step {last}", lambda: last_step(self.experiment) >= last, STEP_S)

    def release(self) -> None:
        """Let a paced run train to its end."""
        paced.allow(self.experiment.folder, 2 * self.experiment.steps)

    def fault(self, kind: str, text: str, *, is_fatal: bool) -> None:
        """Note what is done to the run; `is_fatal` if the run may have to start again."""
        say(f"{text}, {self.steps} steps told")
        self.outcome.faults.append(kind)
        self.outcome.num_fatal += is_fatal

    def finish(self, timeout_s: float) -> Verdict:
        """Wait for the end and hold the run to its promises."""
        try:
            status = self.launcher.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            sys.stderr.write(self.launcher.output.read_text(errors="replace")[-5000:])
            status = -1
        self.outcome.causes += self.launcher.causes()
        self.outcome.is_done = status == 0
        verdict = judge(self.experiment, self.outcome)
        for cause in self.outcome.causes:
            say(f"it had to start again: {cause}")
        counts = f"lost {verdict.lost}, repeated {verdict.repeated}, prompts {json.dumps(verdict.states)}"
        say(f"exit status {status}, {counts}")
        return verdict


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []

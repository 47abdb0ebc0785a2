"""What runs on clusters share: the tiny experiment under some launcher, followed to its end, and what became of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos.experiment import Experiment, Launcher
from chaos.kills import Outcome
from chaos.promises import Verdict, judge
from harness.processes import Program, command_of, marked, wait_until
from harness.report import conclude, print_result, say, seconds

from arealite.api.run_folder import RunFolder
from arealite.utils.files import read_jsonl
from arealite.utils.processes import kill_tree
from cluster import paced

PACED = Path(paced.__file__)
"""Entry of experiments that train as many steps as they are allowed (see `ClusterRun.allow`)."""
STEP_S = 600.0
"""Timeout of what the steps of `ClusterRun.do` take together."""


def tell_result(result: dict[str, Any], verdict: Verdict, folder: Path) -> int:
    """Print the last lines of a suite, and return its exit status."""
    conclude(verdict.broken, folder)
    result |= {"lost": verdict.lost, "repeated": verdict.repeated, "broken": len(verdict.broken)}
    return print_result({**result, "seconds": round(seconds())}, is_broken=bool(verdict.broken))


@dataclass
class ClusterRun:
    """A run of the experiment, and what was done to it."""

    experiment: Experiment
    programs: list[Program]
    """All of them run until the run has ended."""
    outcome: Outcome = field(default_factory=Outcome)

    @classmethod
    @contextlib.contextmanager
    def start(cls, experiment: Experiment, module: str, *overrides: str, **env: str) -> Iterator[ClusterRun]:
        """Start `python -m <module>` on the experiment, and kill it if it still is there at last."""
        paced.allow(experiment.folder, 1)
        launcher = experiment.launch(0, *overrides, module=module, **env)
        try:
            yield cls(experiment, [launcher])
        finally:
            kill_tree(launcher.process.pid)
            launcher.process.wait(120)

    @property
    def launcher(self) -> Launcher:
        """Return the launcher of a run that was started by one."""
        (launcher,) = self.programs
        assert isinstance(launcher, Launcher)
        return launcher

    @property
    def last_step(self) -> int:
        """Return the last step that was reported; -1 before the first one."""
        return max((int(row["step"]) for row in read_jsonl(RunFolder(self.experiment.run_folder).metrics)), default=-1)

    def process(self, *words: str) -> psutil.Process:
        """Return the outermost process of the run whose command line has these words."""
        found = [pid for pid in marked(self.experiment.folder) if set(words) <= set(command_of(pid))]
        return min(map(psutil.Process, found), key=lambda one: len(one.parents()))

    def said(self, text: str) -> int:
        """Return how many lines of the launcher have this text."""
        return sum(text in line for line in self.launcher.text().splitlines())

    def wait(self, what: str, is_so: Callable[[], object], timeout_s: float) -> None:
        """Wait for something that must come true while the run runs."""
        wait_until(what, is_so, timeout_s, *self.programs)

    def allow(self, num_steps: int) -> None:
        """Let a paced run do more steps than it has reported."""
        paced.allow(self.experiment.folder, self.last_step + 1 + num_steps)

    def do(self, num_steps: int) -> None:
        """Let a paced run do more steps, and wait for them."""
        last = self.last_step + num_steps
        self.allow(num_steps)
        self.wait(f"step {last}", lambda: self.last_step >= last, STEP_S)
        say(f"step {self.last_step}")

    def release(self) -> None:
        """Let a paced run train to its end."""
        paced.allow(self.experiment.folder, 2 * self.experiment.steps)

    def fault(self, kind: str, text: str, *, is_fatal: bool = False) -> None:
        """Note what is done to the run; `is_fatal` if the run may have to start again."""
        say(f"FAULT {text}, after step {self.last_step}")
        self.outcome.faults.append(kind)
        self.outcome.num_fatal += is_fatal

    def finish(self, timeout_s: float) -> Verdict:
        """Wait for the end of the launcher, and hold the run to its promises."""
        try:
            status = self.launcher.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            sys.stderr.write(self.launcher.text()[-5000:])
            status = -1
        self.outcome.causes += self.launcher.causes()
        self.outcome.is_done = status == 0
        verdict = judge(self.experiment, self.outcome)
        for cause in self.outcome.causes:
            say(f"it had to start again: {cause}")
        counts = f"lost {verdict.lost}, repeated {verdict.repeated}, prompts {json.dumps(verdict.states)}"
        say(f"exit status {status}, {counts}")
        return verdict

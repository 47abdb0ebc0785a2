"""Servers that come and go while a run trains: `python -m cluster.elastic`, with `tests` on the path.

One local run starts with one server. Two join, one leaves, one is killed; nothing may be lost or repeated, and the
generation must follow: every live server samples, and none that has gone. Rates are reported, never judged: how much a
third server helps depends on the machine.

The suite allows the trainer one step after the other (see `paced`), so that nothing depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from chaos.experiment import Experiment
from harness.processes import Program, guarded
from harness.report import make_folder, say

from arealite.api.run_folder import RunFolder
from arealite.inference.registry import RegistryClient, RegistryError
from arealite.rollout.account.rollout_file import read_rows
from arealite.utils.files import read_jsonl
from arealite.utils.processes import kill_tree
from cluster.followed import PACED, ClusterRun, tell_result

STEPS = 44
OVERRIDES = [
    "lite.slots=4",
    "rollout.request_timeout=120",  # most of which a request waits for its turn
    "rollout.episode_timeout=240",
    "evaluator.freq_steps=null",
    "recover.freq_steps=5",
    "launcher.trainer_threads=1",
    "launcher.stall_timeout=600",  # the suite holds the trainer while servers load
]
CHART = '"title":"Servers"'
_WAIT_S = 300.0
"""For a server to load or to be gone."""
_PHASE = 5
"""Steps."""
_MAX_CATCH_UP = 4
"""Most steps after which all servers that the trainer knows of must have the newest weights."""
_CAME, _WENT = "has joined and gets requests", "with current weights are left"
"""What the trainer says of servers that come and go."""


class Elastic:
    """The run, and the phases between which servers come or go."""

    def __init__(self, run: ClusterRun) -> None:
        self.run = run
        self.phases: list[tuple[int, int, int]] = []
        """Servers, first step and last step."""
        self._first = 1

    def wait_for_servers(self, number: int) -> None:
        """Begin a phase after the first step for which so many servers had the newest weights."""
        self.run.wait(f"{number} registered servers", lambda: self._num_registered() == number, _WAIT_S)
        is_known = lambda: 1 + self.run.said(_CAME) - self.run.said(_WENT) == number  # noqa: E731
        self.run.wait(f"word of the trainer of {number} servers", is_known, _WAIT_S)
        for _ in range(_MAX_CATCH_UP):
            self.run.do(1)
            if self._live() == number:
                break
        else:
            raise TimeoutError(f"{number} servers must have the newest weights within {_MAX_CATCH_UP} steps")
        self._first = self.run.last_step + 1

    def end_phase(self, num_servers: int) -> None:
        """Do the steps of a phase, and note it."""
        self.run.do(_PHASE)
        self.phases.append((num_servers, self._first, self.run.last_step))
        say(f"steps {self._first}..{self.phases[-1][2]} had {num_servers} servers: {self.rates()[-1]:.0f} tokens/s")

    def rates(self) -> list[float]:
        """Return the mean rate of generation in each phase."""
        rows = {row["step"]: row for row in self._rows()}
        return [_mean_rate([rows[step] for step in range(first, last + 1)]) for _, first, last in self.phases]

    def complaints(self) -> list[str]:
        """Say what the numbers and the page of the run don't tell as they must."""
        found = []
        rows = {row["step"]: row for row in self._rows()}
        for number, first, last in self.phases:
            told = {rows[step]["servers/live"] for step in range(first, last + 1)}
            if told != {number}:
                found.append(f"metrics must tell {number} servers in steps {first}..{last}: got {sorted(told)}")
            samplers = self._samplers(first, last)
            if len(samplers) != number:
                found.append(f"{number} servers must sample in steps {first}..{last}: got {sorted(samplers)}")
        if len(everyone := set.union(*(self._samplers(first, last) for _, first, last in self.phases))) != 3:
            found.append(f"three servers must have sampled what was trained on: got {sorted(everyone)}")
        if CHART not in (self.run.experiment.run_folder / "report.html").read_text(encoding="utf-8"):
            found.append("the report must show the servers over time")
        return found

    def _samplers(self, first: int, last: int) -> set[str]:
        """Return the servers of the samples that began and were trained on in these steps."""
        folder = RunFolder(self.run.experiment.run_folder).rollouts
        rows = [row for step in range(first, last + 1) for row in read_rows(folder / f"step_{step}")]
        began = [row for row in rows if min(version for version in row["versions"] if version >= 0) >= first]
        return {address for row in began for address in row["server"].split(",")}

    def _num_registered(self) -> int:
        folder = RunFolder(self.run.experiment.run_folder)
        with contextlib.suppress(RegistryError, OSError):
            client = RegistryClient(folder.registry, folder.secret.read_text().strip())
            return len(asyncio.run(client.watch(timeout_s=0)).servers)
        return 0

    def _live(self) -> int:
        rows = self._rows()
        return int(rows[-1]["servers/live"]) if rows else 0

    def _rows(self) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(RunFolder(self.run.experiment.run_folder).metrics) if "servers/live" in row]


def suffer(elastic: Elastic, stack: contextlib.ExitStack) -> None:
    """Let servers come and go."""
    run = elastic.run
    elastic.wait_for_servers(1)
    elastic.end_phase(1)
    run.fault("join", "two servers join")
    run.fault("join", "the second one")
    leaving, dying = (stack.enter_context(_joiner(run.experiment, number)) for number in (1, 2))
    elastic.wait_for_servers(3)
    elastic.end_phase(3)
    run.fault("leave", "SIGTERM to a server")
    leaving.process.terminate()
    elastic.wait_for_servers(2)
    leaving.expect_done(_WAIT_S)
    elastic.end_phase(2)
    run.fault("kill_server", "kill -9 of a server")
    kill_tree(dying.process.pid)
    elastic.wait_for_servers(1)
    elastic.end_phase(1)
    run.release()


def main() -> int:
    """Run everything and print the result."""
    folder, model = make_folder("elastic")
    experiment = Experiment(folder / "run", model, "lite.d1p1t1+d1p1t1", steps=STEPS, group_size=2, entry=PACED)
    with (
        contextlib.ExitStack() as stack,
        ClusterRun.start(experiment, "arealite.launcher.local", *OVERRIDES) as run,
    ):
        elastic = Elastic(run)
        suffer(elastic, stack)
        verdict = run.finish(_WAIT_S)
    verdict.broken += elastic.complaints()
    told = {"nodes": 1, "processes": 5, "steps": run.last_step, "faults": run.outcome.faults}
    told |= {"staleness_max": verdict.staleness_max, "tokens_per_s": [round(rate) for rate in elastic.rates()]}
    return tell_result(told, verdict, folder)


def _mean_rate(rows: list[dict[str, Any]]) -> float:
    """Return the mean over time of what steps tell."""
    times = [row["time/step_s"] for row in rows]
    num_tokens = sum(row["perf/generated_tokens_per_s"] * time for row, time in zip(rows, times))
    return float(num_tokens / sum(times))


def _joiner(experiment: Experiment, number: int) -> contextlib.AbstractContextManager[Program]:
    command = [sys.executable, "-m", "arealite.cli.main", "serve", "--join", "chaos/run"]
    command += ["--fileroot", str(experiment.folder / "runs")]
    return guarded(command, experiment.folder / f"joiner-{number}.txt", env=experiment.environment)


if __name__ == "__main__":
    sys.exit(main())

"""Detects a stalled run, names the process responsible, and saves the evidence in `<run folder>/stall_<time>.txt`.

A run is stalled if no process has made progress for `timeout_s`. Until every process has made its first progress, their
output counts as progress too, and the start may take `setup_timeout_s`.

A stuck process need not cooperate: the kernel knows its state, and a signal handler in C writes its stacks
(`utils.heartbeat`). Durations are in seconds up to now.

In a stall almost every process waits for another. The first of `RULES` that matches names the culprit; the last
always matches.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from arealite.api.script import SourceLine, users_line
from arealite.utils.files import free_space
from arealite.utils.heartbeat import STACKS_SIGNAL
from arealite.utils.processes import identity, machine, send_signal

_STACKS_S = 1.0
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')
_SILENT_S = 5.0  # heartbeats come twice a second
_NO_GIL = "holds the GIL in C code", "Call that code in another process."
_HALTED = {
    psutil.STATUS_STOPPED: ("is stopped by a signal (state T)", "Continue it with kill -CONT {pid}."),
    psutil.STATUS_TRACING_STOP: ("is held by a debugger (state t)", "Continue it in the debugger."),
    psutil.STATUS_DISK_SLEEP: ("is stuck in the kernel (state D)", "Look at the disk and at its network mounts."),
}


@dataclass(frozen=True)
class Wait:
    """A wait of a thread: its subject, its kind (`heartbeat.WaitsOn`), and the process it waits for, if any."""

    what: str
    on: str | None
    for_s: float
    is_main: bool
    pid: int | None = None


@dataclass(frozen=True)
class Process:
    """A living process, as its last heartbeat describes it."""

    name: str
    pid: int
    count: int | None = None  # of its progress; None has no heartbeat
    moved_s: float = 0.0
    silent_s: float = 0.0  # since the heartbeat; 0 on other nodes, whose clocks differ
    waits: tuple[Wait, ...] = ()
    reports: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""  # psutil's name for it; empty on other nodes, as are stacks
    stacks: str = ""  # faulthandler's text

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def wait(self) -> Wait | None:
        """The wait of the main thread."""
        return next((wait for wait in self.waits if wait.is_main), None)

    @property
    def main_stack(self) -> list[SourceLine]:
        """The stack of the main thread, innermost line first."""
        return (stacks_of(self.stacks) or [[]])[-1]

    @property
    def line(self) -> SourceLine | None:
        """The innermost line of user code in the main thread, or else its innermost line."""
        return users_line(self.main_stack) or next(iter(self.main_stack), None)


@dataclass(frozen=True)
class Evidence:
    stalled_s: float
    processes: Sequence[Process]
    expected: Sequence[str] = ()  # names of the processes that must have a heartbeat

    @property
    def beating(self) -> list[Process]:
        """The processes that have a heartbeat."""
        return [process for process in self.processes if process.count is not None]


def read_heartbeats(folder: Path, name: str = "*") -> list[Process]:
    """Return the living processes that have a heartbeat; those of other nodes count as alive."""
    processes = []
    for path in sorted(folder.glob(f"{name}.*.json")):
        *_, node, started, _ = path.name.split(".")
        is_here = node == machine()
        if is_here and started != identity(int(started.partition("-")[0])):
            continue
        try:
            state = json.loads(path.read_bytes())
        except OSError:  # NFS may have lost a file that another node replaces
            continue
        published, waits = state.pop("published"), tuple(Wait(**wait) for wait in state.pop("waits"))
        silent_s = time.monotonic() - published if is_here else 0.0
        processes.append(Process(**state, waits=waits, silent_s=silent_s))
    return processes


def collect(folder: Path, expected: Sequence[str], *, stalled_s: float) -> Evidence:
    """Return the living processes that have a heartbeat or write their stacks, the latter with their stacks."""
    processes = {(process.name, process.pid): process for process in read_heartbeats(folder)}
    stacks = {}
    for path in folder.glob("*.stacks"):
        name, started, _ = path.name.rsplit(".", 2)
        pid = int(started.partition("-")[0])
        if started == identity(pid):  # the signal would end another process
            stacks[name, pid] = path
            os.truncate(path, 0)
            send_signal(pid, STACKS_SIGNAL)
    time.sleep(_STACKS_S)
    for key, path in stacks.items():
        process = processes.get(key, Process(*key))
        processes[key] = replace(process, state=_state(process.pid), stacks=path.read_text(errors="replace"))
    return Evidence(stalled_s, list(processes.values()), expected)


def stacks_of(text: str) -> list[list[SourceLine]]:
    """Parse faulthandler's text: the stack of each thread, innermost line first; the main thread's is last."""
    stacks: list[list[SourceLine]] = []
    for row in text.splitlines():
        if row.endswith("(most recent call first):"):
            stacks.append([])
        elif (frame := _FRAME.match(row)) and stacks:
            line = int(frame["line"]) if frame["line"].isdigit() else 0
            stacks[-1].append(SourceLine(frame["file"], line, frame["function"]))
    return stacks


def _state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


@dataclass(frozen=True, kw_only=True)
class StallWatch:
    """Watches the processes that this one has started and that publish a heartbeat in `<logs>/progress`."""

    timeout_s: float
    setup_timeout_s: float
    logs: Path
    expected: Sequence[str]  # names of the processes that must have a heartbeat
    count_output: Callable[[], int]

    async def stall(self) -> list[str]:
        """Wait until the run is stalled and return the lines of the verdict."""
        counts: object = None
        moved = time.monotonic()
        while True:
            before, (counts, limit_s) = counts, self._look()
            stalled_s = time.monotonic() - moved
            if counts != before:
                moved = time.monotonic()
            elif stalled_s > limit_s:
                folder = self.logs / "progress"
                evidence = await asyncio.to_thread(collect, folder, self.expected, stalled_s=stalled_s)
                if self._look()[0] == counts:
                    return self._save(evidence)
            await asyncio.sleep(min(5.0, self.timeout_s / 10))

    def _look(self) -> tuple[object, float]:
        """Return counts that change with any progress, and for how many seconds they may stand still."""
        heartbeats = read_heartbeats(self.logs / "progress")
        counts = {(process.name, process.pid): process.count for process in heartbeats}
        if {process.name for process in heartbeats}.issuperset(self.expected):
            return counts, self.timeout_s
        return (counts, self.count_output()), max(self.timeout_s, self.setup_timeout_s)

    def _save(self, evidence: Evidence) -> list[str]:
        lines, disk = judge(evidence).lines(evidence), f"disk: {free_space(self.logs)}"
        path = self.logs.parent / f"stall_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        try:
            path.write_text("\n".join([*lines, "", disk, *_details(evidence)]) + "\n", encoding="utf-8")
        except OSError as error:
            return [*lines, f"    the evidence could not be written to {path}: {error}; {disk}"]
        return [*lines, f"    all stacks, waits and queues: {path}"]


def _details(evidence: Evidence) -> list[str]:
    text = []
    for process in evidence.processes:
        text += ["", str(process), json.dumps(asdict(process) | {"stacks": ""}, indent=1), *process.stacks.splitlines()]
    return text


@dataclass(frozen=True)
class Verdict:
    """The culprit, its line, since when, and what to do about it."""

    culprit: str
    reason: str
    for_s: float | None
    advice: str

    def lines(self, evidence: Evidence) -> list[str]:
        """Return the lines for the console: the verdict, the advice, and the waits of all other processes."""
        duration = "" if self.for_s is None else f", for {self.for_s:.0f} s"
        head = f"stalled: no progress for {evidence.stalled_s:.0f} s: {self.culprit} {self.reason}{duration}"
        others = [process for process in evidence.beating if not self.culprit.startswith(str(process))]
        return [head, f"    {self.advice}", *(f"    {process} {_doing(process)}" for process in others)]


def judge(evidence: Evidence) -> Verdict:
    return next(filter(None, (rule(evidence) for rule in RULES)))


def _silent(evidence: Evidence) -> Verdict | None:
    """A process that can't publish its heartbeat."""
    for process in evidence.processes:
        is_silent = process.silent_s > max(_SILENT_S, evidence.stalled_s / 2)
        if is_silent or process.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            reason, advice = _HALTED.get(process.state, _NO_GIL)
            lines = [users_line(stack) for stack in stacks_of(process.stacks)]  # any thread may hold the GIL
            where = "; ".join(dict.fromkeys(str(line) for line in lines if line))
            reason += f": {where}" if where else ""
            return Verdict(str(process), reason, process.silent_s or None, advice.format(pid=process.pid))
    return None


def _not_begun(evidence: Evidence) -> Verdict | None:
    """A process that has not made its first progress."""
    begun = {process.name for process in evidence.beating}
    missing = next((name for name in evidence.expected if name not in begun), None)
    advice = "Look at its log; a slow start needs a larger rollout.setup_timeout."
    return None if missing is None else Verdict(missing, "has not made its first progress", None, advice)


def _episodes(evidence: Evidence) -> Verdict | None:
    """The reason why a trainer waits for episodes: their event loop is blocked, or the await of the oldest episode."""
    if not any(process.wait and process.wait.on == "rollout" for process in evidence.beating):
        return None
    for process, loop in _reports(evidence, "loop "):
        if loop["blocked_by"]:
            reason = f"blocks the event loop of episodes at {loop['blocked_by']}"
            advice = "Await there, or call it through asyncio.to_thread."
            return Verdict(str(process), reason, loop["overdue_s"], advice)
    calls = [(wait, process) for process in evidence.beating for wait in process.waits if wait.on == "reward"]
    for call, caller in sorted(calls, key=lambda item: -item[0].for_s):
        worker = next((process for process in evidence.processes if process.pid == call.pid), None)
        line = f" at {worker.line}" if worker and worker.line else ""
        advice = "Fix the function, or set rollout.reward_timeout to end such a call."
        reason = f"has not returned{line} (called by {caller})"
        return Verdict(f"{call.what} (pid {call.pid})", reason, call.for_s, advice)
    episodes = [
        (episode, process) for process, report in _reports(evidence, "episodes") for episode in report["oldest"]
    ]
    for episode, process in sorted(episodes, key=lambda item: (item[0]["on"] == "servers", -item[0]["for_s"])):
        reason = f"awaits at {episode['line']}"
        advice = "Give that await a deadline (asyncio.timeout), or set rollout.episode_timeout."
        if episode["on"] == "servers":
            tokens = {address: num for _, report in _reports(evidence, "servers") for address, num in report.items()}
            busy = sorted(address for address, num in tokens.items() if num)
            reason, advice = f"waits for the servers {', '.join(busy)}", "Look at their logs."
        return Verdict(f"episode {episode['name']} in {process}", reason, episode["for_s"], advice)
    return None


def _longest_wait(evidence: Evidence) -> Verdict:
    """The process that does not wait for another, or else the process that has waited longest."""

    def order(process: Process) -> tuple[bool, bool, bool, float]:
        in_collective = any("/torch/distributed/" in line.file for line in process.main_stack[:8])
        for_ranks = in_collective or bool(process.wait and process.wait.on == "ranks")
        return process.name.startswith("server-"), for_ranks, process.wait is not None, -_for_s(process)

    process = min(evidence.beating, key=order, default=None)
    if process is None:
        return Verdict("the run", "has no heartbeat", None, "Look at the logs.")
    return Verdict(str(process), _doing(process), _for_s(process), "Its stacks are in the evidence.")


RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (_silent, _not_begun, _episodes, _longest_wait)


def _reports(evidence: Evidence, prefix: str) -> list[tuple[Process, Any]]:
    """Return the reports under names that begin so; reports that failed are left out."""
    reports = [(process, *item) for process in evidence.beating for item in process.reports.items()]
    return [(process, made) for process, name, made in reports if name.startswith(prefix) and "error" not in made]


def _for_s(process: Process) -> float:
    return process.wait.for_s if process.wait else process.moved_s


def _doing(process: Process) -> str:
    what = f"waits for {process.wait.what}" if process.wait else "runs"
    return what + (f" at {process.line}" if process.line else "")

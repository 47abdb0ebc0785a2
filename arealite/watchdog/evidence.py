"""The evidence of a stall: the processes of a run with their waits and stacks.

Nothing here needs the cooperation of a stuck process: the kernel knows its state, and a signal handler in C writes its
stacks (`utils.heartbeat`). Durations are in seconds up to now.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from arealite.api.script import SourceLine, users_line
from arealite.utils.heartbeat import STACKS_SIGNAL
from arealite.utils.processes import catches, identity, machine, send_signal

_STACKS_S = 1.0
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')


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
        if started == identity(pid) and catches(pid, STACKS_SIGNAL):  # the signal would end another process
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

"""What a stalled run looks like: its processes, their stacks, what each waits for, the servers, the disk.

Nothing here needs the cooperation of a stuck process: the kernel tells its state, our own processes write their stacks
on a signal that is answered in C (`utils.heartbeat`), py-spy, if installed, reads those of others. Every look has a
deadline. What it means is judged in `verdict`.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from arealite.api.source_lines import SourceLine, users_line
from arealite.utils.files import free_space, require_object
from arealite.utils.heartbeat import STACKS_SIGNAL
from arealite.utils.processes import catches, descendants, identity, machine, send_signal
from arealite.utils.secret import authorization
from arealite.utils.threads import start_thread

_STACKS_S = 2.0
_SERVER_S = 3.0
_PY_SPY_S = 10.0
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')
_directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")


@dataclass(frozen=True)
class Wait:
    """What a thread waits for, and since when (monotonic)."""

    what: str
    on: str | None
    since: float
    is_main: bool
    pid: int | None = None


@dataclass(frozen=True)
class Progress:
    """What a process published about itself."""

    name: str
    pid: int
    count: int
    moved: float
    published: float
    main_thread: int
    waits: tuple[Wait, ...] = ()
    reports: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)  # how far the run is, for its user


@dataclass(frozen=True)
class Process:
    """A living process of the run."""

    name: str
    pid: int
    state: str  # as psutil spells it; `unknown` on another node
    cpu_share: float
    command: str
    progress: Progress | None = None
    stacks: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def waits(self) -> tuple[Wait, ...]:
        return self.progress.waits if self.progress else ()

    @property
    def wait(self) -> Wait | None:
        """What the main thread waits for."""
        return next((wait for wait in self.waits if wait.is_main), None)

    @property
    def moved(self) -> float | None:
        """When its counter last moved, if it publishes one."""
        return self.progress.moved if self.progress else None

    def main_stack(self) -> list[SourceLine]:
        """Return the stack of the main thread, innermost line first; of a foreign process that of its last one."""
        stacks = stacks_of(self.stacks)
        main_thread = next(reversed(stacks), 0) if self.progress is None else self.progress.main_thread
        return stacks.get(main_thread, [])

    @property
    def line(self) -> SourceLine | None:
        """The innermost line of user code in the main thread, or else its innermost line."""
        stack = self.main_stack()
        return users_line(stack) or (stack[0] if stack else None)


@dataclass(frozen=True)
class ServerState:
    """What a server answered to GET /server_info."""

    name: str
    address: str
    answer: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True)
class Evidence:
    now: float  # monotonic, as all times here
    stalled_s: float
    processes: Sequence[Process]
    servers: Sequence[ServerState]
    disk: str
    expected: Sequence[str] = ()  # names of the processes that should publish

    def publishing(self, prefix: str = "") -> list[Process]:
        """Return the processes that publish under a name that begins so."""
        return [one for one in self.processes if one.progress is not None and one.name.startswith(prefix)]


def read_progress(folder: Path, name: str = "*") -> dict[str, Progress]:
    """Return what living processes publish, by identity; those of other nodes count as alive, and as told just now."""
    found: dict[str, Progress] = {}
    for path in sorted(folder.glob(f"{name}.*.json")):
        *_, host, process, _ = path.name.split(".")
        is_here = host == machine()
        if is_here and process != identity(int(process.partition("-")[0])):
            continue
        if (progress := _read(path)) is not None:
            found[process if is_here else f"{host}.{process}"] = progress if is_here else _told_now(progress)
    return found


def collect(
    logs: Path, servers: Mapping[str, str], expected: Sequence[str], *, stalled_s: float, secret: str | None = None
) -> Evidence:
    """Look at everything this process has started; `servers` are addresses by name, `expected` should publish."""
    progress = read_progress(logs / "progress")
    asked = [start_thread(_ask, name, address, secret) for name, address in servers.items()]  # it may take for ever
    told = {one.pid for process, one in progress.items() if "." not in process}  # also started by Ray or Slurm
    pids = descendants(os.getpid())
    pids += sorted(told - set(pids))
    looked = list(_opened(pids))
    stacks, names = _stacks(logs / "stacks", pids)
    processes = []
    for process in looked:
        with contextlib.suppress(psutil.Error), process.oneshot():
            pid, cpu_share, state = process.pid, process.cpu_percent() / 100, process.status()
            published = progress.get(identity(pid) or "")
            name = published.name if published else names.get(pid) or _name(process)
            command = shlex.join(process.cmdline())
            processes.append(Process(name, pid, state, cpu_share, command, published, stacks.get(pid, "")))
    elsewhere = [one for process, one in progress.items() if "." in process]
    processes += [Process(one.name, one.pid, "unknown", 0.0, "on another node", one) for one in elsewhere]
    wait(asked, timeout=_SERVER_S)
    late = f"no whole answer within {_SERVER_S:g} s"
    states = [
        one.result() if one.done() else ServerState(name, address, None, late)
        for one, (name, address) in zip(asked, servers.items(), strict=True)
    ]
    return Evidence(time.monotonic(), stalled_s, processes, states, free_space(logs), expected)


def stacks_of(text: str) -> dict[int, list[SourceLine]]:
    """Return the stacks of faulthandler's text by thread, innermost line first."""
    stacks: dict[int, list[SourceLine]] = {}
    for row in text.splitlines():
        if begin := _THREAD.match(row):
            stacks[int(begin["ident"], 16)] = []
        elif (frame := _FRAME.match(row)) and stacks:
            line = int(frame["line"]) if frame["line"].isdigit() else 0
            stacks[next(reversed(stacks))].append(SourceLine(frame["file"], line, frame["function"]))
    return stacks


def _read(path: Path) -> Progress | None:
    for _ in range(3):  # it is being rewritten in place
        with contextlib.suppress(ValueError, KeyError, TypeError):
            state = json.loads(path.read_text(encoding="utf-8"))
            return Progress(**state | {"waits": tuple(Wait(**wait) for wait in state["waits"])})
        time.sleep(0.005)
    return None


def _told_now(progress: Progress) -> Progress:
    shift = time.monotonic() - progress.published  # from the clock of another node to ours
    waits = tuple(replace(wait, since=wait.since + shift) for wait in progress.waits)
    return replace(progress, moved=progress.moved + shift, published=progress.published + shift, waits=waits)


def _stacks(folder: Path, pids: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Return stacks and names of the processes that write their own, and the stacks of others."""
    answering = [pid for pid in pids if catches(pid, STACKS_SIGNAL)]  # it would end others, also one just ending
    files = {pid: path for pid in answering for path in folder.glob(f"*.{identity(pid)}.txt")}
    before = {pid: path.stat().st_size for pid, path in files.items()}
    for pid in files:
        send_signal(pid, STACKS_SIGNAL)
    spy = shutil.which("py-spy")
    stacks = {pid: _spied(spy, pid) for pid in pids if pid not in files} if spy else {}
    deadline, last = time.monotonic() + _STACKS_S, before
    while time.monotonic() < deadline:
        time.sleep(0.2)
        sizes = {pid: path.stat().st_size for pid, path in files.items()}
        if sizes == last and all(sizes[pid] > before[pid] for pid in files):
            break
        last = sizes
    stacks |= {pid: path.read_bytes()[before[pid] :].decode(errors="replace") for pid, path in files.items()}
    return stacks, {pid: path.name.partition(".")[0] for pid, path in files.items()}


def _spied(spy: str, pid: int) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=False).stdout
    return ""


def _ask(name: str, address: str, secret: str | None) -> ServerState:
    request = urllib.request.Request(f"http://{address}/server_info", headers=authorization(secret))
    try:
        with _directly.open(request, timeout=_SERVER_S) as answer:
            return ServerState(name, address, require_object(json.loads(answer.read())))
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        return ServerState(name, address, None, f"{type(error).__name__}: {error}")


def _opened(pids: Sequence[int]) -> Iterator[psutil.Process]:
    """Yield the living ones, each with its CPU time measured from now on."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            process.cpu_percent()
            yield process


def _name(process: psutil.Process) -> str:
    """Name a process by its rank or its program, e.g. `arealite.launcher.place.guard`."""
    words = process.cmdline()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    with contextlib.suppress(psutil.Error):
        if rank := process.environ().get("RANK"):
            return f"trainer-{rank}"
    return (words or ["process"])[0].rpartition("/")[2]

"""The processes of a run: by role below its launcher, and by the run's marker wherever they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
from harness.processes import command_of, marked

from arealite.utils.processes import descendants
from chaos.experiment import AGENT_ENTRY, ENTRY

Role = Literal["server", "trainer", "launcher", "guard", "reward", "foreign_server"]

SUPERVISORS = ("arealite.launcher.place.guard", "arealite.launcher.serve")


def find(role: Role, launcher: int) -> list[int]:
    """Return the processes of a role below a launcher (or the launcher); foreign servers are ours."""
    if role == "launcher":
        return [launcher]
    if role == "foreign_server":
        own = descendants(launcher)
        return [pid for pid in descendants(os.getpid()) if role_of(pid) == "server" and pid not in own]
    return [pid for pid in descendants(launcher) if role_of(pid) == role]


def role_of(pid: int) -> Role | None:
    """Tell the role of a process by its command line; the supervising processes are all `guard`."""
    words = command_of(pid)
    match words[1:3]:
        case ["-m", name] if name in SUPERVISORS:
            return "guard"
        case ["-m", "arealite.server"]:
            return "server"
        case ["-m", "arealite.launcher.local"]:
            return "launcher"
        case [script, *_] if script in (str(ENTRY), str(AGENT_ENTRY)):
            return "trainer"
        case ["-P", "-c"] if "arealite.utils.worker_process" in words[3]:
            return "reward"
    return None


def describe(pid: int) -> str:
    """Name a process."""
    return f"{pid} ({role_of(pid) or ' '.join(command_of(pid))[:120]})"


def listening_ports(pids: list[int]) -> set[int]:
    """Return the ports on which processes listen."""
    return {port for port, pid in _listeners() if pid in pids}


def orphaned_ports(ports: set[int], folder: Path) -> set[int]:
    """Return which of a run's ports it still listens on; another program may have taken one meanwhile."""
    ours = {None, *marked(folder)}
    return {port for port, pid in _listeners() if port in ports and pid in ours}


def _listeners() -> Iterator[tuple[int, int | None]]:
    """Yield all ports on which someone listens, and who; None is nobody's."""
    for connection in psutil.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            yield connection.laddr.port, connection.pid

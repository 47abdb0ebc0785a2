"""What the parts share: what they found, what is judged in the same way everywhere, and values that nobody expects."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from harness.processes import MARKER, leftovers
from testing_processes import spawn

from arealite.utils.background import MAX_IDLE

SECRET = "5e" * 32
"""The secret of every server and client here, which nothing may print."""
DEADLINE_S = 60.0
"""For an honest request, and for whatever must end by itself after a second or two."""
_SETTLE_S = 30.0
_MAX_FILES, _MAX_THREADS = 8, MAX_IDLE + 16  # MAX_IDLE wait for the next call
"""Most that a process may keep of connections and threads, whatever it was sent."""
_MAX_LOG_BYTES, _LOG_BYTES_PER_INPUT = 2**17, 300
_DEAD = ("Traceback (most recent call last)", "never retrieved", "was destroyed but it is pending", "was never awaited")

T = TypeVar("T")


@dataclass
class Report:
    """What came of a part."""

    tried: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """How often each kind of answer or error came."""
    leaks: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def count(self, kind: str) -> None:
        """Count an input by what it met."""
        self.tried += 1
        self.errors[kind] += 1

    def add(self, other: Report) -> None:
        self.tried += other.tried
        self.errors += other.errors
        self.leaks += other.leaks
        self.broken += other.broken


@dataclass(frozen=True)
class Usage:
    """What a process holds at a moment."""

    files: int
    threads: int
    children: int
    log_bytes: int

    @classmethod
    def of(cls, pid: int, log: Path | None = None) -> Usage:
        process = psutil.Process(pid)
        size = log.stat().st_size if log is not None else 0
        return cls(process.num_fds(), process.num_threads(), len(process.children(recursive=True)), size)

    def leaks(self, later: Usage, *, what: str, inputs: int) -> list[str]:
        """Say what a process holds or has written since, beyond what it may after so many inputs."""
        bounds = {
            "files": self.files + _MAX_FILES,
            "threads": self.threads + _MAX_THREADS,
            "children": self.children,
            "log_bytes": self.log_bytes + _MAX_LOG_BYTES + _LOG_BYTES_PER_INPUT * inputs,
        }
        found = vars(later)
        return [
            f"{what} must have at most {bound} {name} after {inputs} inputs: got {found[name]}"
            for name, bound in bounds.items()
            if found[name] > bound
        ]


def settled(look: Callable[[], Sequence[str]]) -> list[str]:
    """Return what `look` still finds when it has found nothing, or after a while."""
    deadline = time.monotonic() + _SETTLE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return list(found)


def judge_text(what: str, text: str, *, dead: Sequence[str] = _DEAD) -> list[str]:
    """Say what a console, a log or an error must not hold: the secret, and tasks that died."""
    broken = [f"{what} must not hold the secret: got {_around(text, SECRET)}"] if SECRET in text else []
    return broken + [f"{what} must report no {sign!r}: got {_around(text, sign)}" for sign in dead if sign in text]


def _around(text: str, sign: str) -> str:
    at = text.index(sign)
    return repr(text[max(0, at - 200) : at + 800].replace(SECRET, "<the secret>"))


def judge_command(what: str, status: int | None, text: str, file: str) -> list[str]:
    """Say what is wrong with the end of a command that met a damaged file: None is a command that did not end."""
    if status is None:
        return [f"{what} must end by its deadline: it did not"]
    broken = judge_text(f"the output of {what}", text, dead=("Traceback (most recent call last)",))
    if status == 0 or broken:
        return broken
    if status != 2:
        return [f"{what} must end with 0 or 2: got {status}: {text[-600:]!r}"]
    lines = [line for line in text.splitlines() if re.match(r"\w*(Error|Refused)\b.*: ", line)]
    if len(lines) != 1 or file not in lines[0]:
        return [f"{what} must say in one error what is wrong with {file}: got {text[-600:]!r}"]
    return []


def judge_account(states: Mapping[str, int], issued: int) -> list[str]:
    """Say whether every prompt that was issued is in one state."""
    ended = sum(states.values())
    text = "issued = trained + rejected + failed + pending"
    return [] if ended == issued else [f"{text} must hold: got {issued} issued and {ended} in {dict(states)}"]


def run_part(command: Sequence[str], folder: Path, name: str, timeout_s: float) -> tuple[list[str], list[str], str]:
    """Run a program that must end by itself and leave nothing; return leaks, what is broken, and what it printed."""
    temporary, console = folder / "tmp", folder / "console.txt"
    temporary.mkdir(parents=True)
    env = os.environ | {MARKER: str(folder), "TMPDIR": str(temporary)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    broken = []
    with console.open("wb") as file:
        process = spawn(command, env=env, stdout=file, stderr=file)
    try:
        status = process.wait(timeout_s)
        if status != 0:
            broken.append(f"{name} must end by itself with 0: got {status}, see {console}")
    except subprocess.TimeoutExpired:
        broken.append(f"{name} must end within {timeout_s:g} s: it did not, see {console}")
        process.send_signal(signal.SIGABRT)  # the console shows where it hangs
        time.sleep(1)
        process.kill()
        process.wait()
    leaks = [f"{name}: {text}" for text in leftovers(folder, temporary, may_stay=("torchinductor", "pymp-"))]
    shutil.rmtree(temporary, ignore_errors=True)
    return leaks, broken, console.read_text(errors="replace")


NESTED = 100_000
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", "0", "x", "\0", "\ud800", "💥" * 10, "A" * 100_000, "/", "../.."),
    *([], [[]], [None], [-1], [2**64], [0.5], ["\ud800"], [[1, 2], [3]], [0] * 5000, {}, {"": {}}, {"x": [1]}),
)
"""Values of every type for every field."""

"""Processes of programs of tests: guarded ones, which end with the program, and all that a run has started.

The marker, a variable of the environment that all descendants inherit, tells what belongs to a run also when its
parents are gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.utils.processes import describe_exit, exit_status, is_alive, kill_tree, wait_gone

REPOSITORY = Path(__file__).parents[2]
MARKER = "AREALITE_CHAOS_RUN"
LEFT_S = 60.0
"""In which the last processes of a run that has ended must be gone."""
_LOOK_S = 0.05
_END_S = 120.0
_LEFT_OUT = ("PYTHONPATH", "VIRTUAL_ENV")


class Broken(Exception):
    """Something did not come as it must."""


@dataclass(frozen=True)
class Program:
    """A started command and the file that it writes to."""

    name: str
    process: subprocess.Popen[bytes]
    """Its guard if it has one, which passes SIGTERM on."""
    output: Path

    def text(self) -> str:
        """Return what it has written so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def expect_done(self, timeout_s: float) -> None:
        """Wait until it has ended with status 0."""
        try:
            status = exit_status(self.process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.name} must end within {timeout_s:g} s") from None
        if status != 0:
            raise Broken(f"{self.name} must end with status 0: got {describe_exit(status)}, see {self.output}")


def wait_until(what: str, is_so: Callable[[], object], timeout_s: float, *programs: Program) -> None:
    """Wait for something while programs run; Broken says what did not come, and what they printed last."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        ended = [one for one in programs if one.process.poll() is not None]
        if ended or time.monotonic() > deadline:
            names = f", and {ended[0].name} has ended" if ended else ""
            shown = "".join(f"\n{one.output}:\n{one.text()[-4000:]}" for one in ended or programs)
            raise Broken(f"within {timeout_s:g} s there must be {what}: there is not{names}{shown}")
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def guarded(
    command: Sequence[str], output: Path, *, env: Mapping[str, str], cwd: Path | str = "/", name: str = ""
) -> Iterator[Program]:
    """Run a command under a guard, which ends it and all that it has started with this block or this process."""
    with output.open("ab") as file:
        whole = [sys.executable, "-m", "arealite.launcher.place.guard", *command]
        process = subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=file, stderr=file, env=env, cwd=cwd)
    try:
        yield Program(name or output.stem, process, output)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the guard's sign to end
        process.wait(_END_S)


def environment(*, also_tests: bool = False) -> dict[str, str]:
    """Return our environment with nothing of our own way of starting, and this very package (and these tests)."""
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    return kept | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}" if also_tests else str(REPOSITORY)}


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def marked(folder: Path) -> Iterator[int]:
    """Yield the living processes that carry the marker of the run in `folder`, ourselves excepted."""
    marker = f"{MARKER}={folder}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and is_alive(int(name)):
            try:
                variables = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:  # gone, or of another user
                continue
            if marker in variables.split(b"\0"):
                yield int(name)


def leftovers(folder: Path, temporary: Path, *, may_stay: tuple[str, ...] = ()) -> Iterator[str]:
    """Report the processes that a run has left, end them, and report its temporary files but those of `may_stay`."""
    wait_gone(marked(folder), LEFT_S)
    if left := {pid: " ".join(command_of(pid))[:120] for pid in marked(folder)}:
        for pid in left:
            kill_tree(pid)
        yield f"no process may be left: got {', '.join(f'{pid} ({command})' for pid, command in left.items())}"
    if names := sorted(path.name for path in temporary.iterdir() if not path.name.startswith(may_stay)):
        yield f"no temporary file may be left: got {names}"

"""What suites on clusters share: programs that end with the suite, and waits that say what did not come."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from chaos.experiment import Experiment

from arealite.api.run_folder import RunFolder
from arealite.utils.files import read_jsonl
from arealite.utils.processes import describe_exit, exit_status

_LOOK_S = 0.05
_END_S = 120.0


class Broken(Exception):
    """Something did not come as it must."""


def wait_until(what: str, is_so: Callable[[], object], timeout_s: float) -> None:
    """Wait for something; Broken says what did not come."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise Broken(f"within {timeout_s:g} s there must be {what}")
        time.sleep(_LOOK_S)


def last_step(experiment: Experiment) -> int:
    """Return the last step that a run has told of; -1 before the first one."""
    return max((int(row["step"]) for row in read_jsonl(RunFolder(experiment.run_folder).metrics)), default=-1)


def skip(reason: str) -> int:
    """Say loudly that a suite can't run here, and return its exit status."""
    print(f"SKIPPED: {reason}\nRESULT {json.dumps({'skipped': reason})}", flush=True)
    return 0


class Program:
    """A command that ends with us at the latest, with all that it has started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name = name
        self.process = process
        """Its guard, which passes SIGTERM on."""
        self.output = output

    def text(self) -> str:
        """Return what it has written so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def expect_running(self) -> None:
        """Raise Broken if it has ended."""
        if (status := self.process.poll()) is not None:
            raise Broken(f"{self.name} must run on: it ended with {describe_exit(exit_status(status))}")

    def expect_done(self, timeout_s: float) -> None:
        """Wait until it has ended, and not by a failure."""
        try:
            status = exit_status(self.process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.name} must end within {timeout_s:g} s") from None
        if status != 0:
            raise Broken(f"{self.name} must end with status 0: got {describe_exit(status)}, see {self.output}")


@contextlib.contextmanager
def program(name: str, command: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> Iterator[Program]:
    """Start a command under a guard; it works in `folder` and writes to a file there."""
    output = folder / f"{name}.txt"
    with output.open("wb") as file:
        guarded = [sys.executable, "-m", "arealite.launcher.place.guard", *command]
        process = subprocess.Popen(guarded, stdin=subprocess.PIPE, stdout=file, stderr=file, env=env, cwd=folder)
    try:
        yield Program(name, process, output)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the guard's sign to end
        process.wait(_END_S)

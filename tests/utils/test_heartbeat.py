"""What a process publishes, read by another one; real processes, as signals and stuck C code are the point."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arealite.utils import heartbeat
from arealite.watchdog.stall import Process, collect, read_heartbeats, stacks_of

PRELUDE = "import os, sys, threading, time\nfrom arealite.utils import heartbeat\n"


@contextmanager
def program(logs: Path, code: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run code that publishes in `logs`."""
    environment = os.environ | {heartbeat.FOLDER_VARIABLE: str(logs / "progress")} | env
    with subprocess.Popen([sys.executable, "-c", PRELUDE + code], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(is_true, timeout_s: float = 120.0):
    deadline = time.monotonic() + timeout_s
    while not (found := is_true()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def published(logs: Path, *, count: int) -> Process:
    def look() -> Process | None:
        return next((one for one in read_heartbeats(logs / "progress") if one.count >= count), None)

    return wait_until(look)


def test_without_the_variable_nothing_happens(tmp_path: Path) -> None:
    code = "heartbeat.tick()\n"
    code += "with heartbeat.waiting('x'): assert threading.active_count() == 1\nassert not os.listdir('.')"
    environment = {name: value for name, value in os.environ.items() if name != heartbeat.FOLDER_VARIABLE}
    paths = os.pathsep.join([str(Path(heartbeat.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=tmp_path, env=environment | {"PYTHONPATH": paths}, check=True
    )


def test_counter_waits_and_reports(tmp_path: Path) -> None:
    code = """
heartbeat.report("queues", lambda: {"running": 3})
heartbeat.report("broken", lambda: 1 / 0)
for _ in range(7): heartbeat.tick()
def wait_beside():
    with heartbeat.waiting("a worker", on="reward", pid=42): time.sleep(60)
threading.Thread(target=wait_beside, daemon=True).start()
with heartbeat.waiting("the outer"), heartbeat.waiting("the inner", on="ranks"):
    time.sleep(60)
"""
    with program(tmp_path, code, **{heartbeat.NAME_VARIABLE: "trainer-3"}) as process:
        published(tmp_path, count=7)
        one = wait_until(lambda: (found := published(tmp_path, count=7)).reports and found)
        assert (one.name, one.pid, one.count) == ("trainer-3", process.pid, 7)
        assert one.reports == {"queues": {"running": 3}, "broken": {"error": "ZeroDivisionError('division by zero')"}}
        assert [(wait.what, wait.on, wait.pid, wait.is_main) for wait in one.waits] == [
            ("the inner", "ranks", None, True),
            ("a worker", "reward", 42, False),
        ]
        assert 0 <= one.moved_s < 60 and 0 <= one.silent_s < 60 and 0 <= one.waits[0].for_s < 60
    assert read_heartbeats(tmp_path / "progress") == [], "the dead publish nothing"


def test_waits_end_also_by_errors_and_decorate_functions() -> None:
    before = {wait["what"] for wait in heartbeat._current_waits(0.0)}

    @heartbeat.waiting("a decorated function", on="disk")
    def read(depth: int) -> list[str]:
        return read(depth - 1) if depth else [wait["what"] for wait in heartbeat._current_waits(0.0) if wait["is_main"]]

    assert read(3) == ["a decorated function"] and read.__name__ == "read"
    with pytest.raises(KeyError), heartbeat.waiting("x"):
        raise KeyError
    assert {wait["what"] for wait in heartbeat._current_waits(0.0)} == before


def test_stacks_of_a_process_stuck_in_c(tmp_path: Path) -> None:
    """The regular expression never ends and never lets another thread of Python run."""
    code = """
import re
def stuck():
    heartbeat.tick()
    time.sleep(1.2)
    re.match("(a*)*b", "a" * 64)
stuck()
"""
    with program(tmp_path, code) as process:
        wait_until(lambda: published(tmp_path, count=1).silent_s > 2)
        (one,) = collect(tmp_path / "progress", [], stalled_s=5).processes
        assert (one.pid, one.count) == (process.pid, 1) and one.state == "running" and one.silent_s > 2
    assert [line.function for line in stacks_of(one.stacks)[-1] if line.file == "<string>"] == ["stuck", "<module>"]

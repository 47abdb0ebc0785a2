"""What a process publishes, read by another one; real processes, as signals and stuck C code are the point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arealite.utils import heartbeat
from arealite.utils.processes import catches, identity
from arealite.watchdog.evidence import Progress, read_progress, stacks_of

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


def published(logs: Path, *, count: int) -> Progress:
    def look() -> Progress | None:
        return next((one for one in read_progress(logs / "progress").values() if one.count >= count), None)

    return wait_until(look)


def test_without_the_variable_nothing_happens(tmp_path: Path) -> None:
    code = "heartbeat.tick()\n"
    code += "with heartbeat.waiting('x'): assert threading.active_count() == 1\nassert not os.listdir('.')"
    environment = {name: value for name, value in os.environ.items() if name != heartbeat.FOLDER_VARIABLE}
    paths = os.pathsep.join([str(Path(heartbeat.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=tmp_path, env=environment | {"PYTHONPATH": paths}, check=True
    )


def test_a_tick_and_a_wait_are_cheap() -> None:
    heartbeat.tick()
    assert min(timeit.repeat(heartbeat.tick, number=10_000, repeat=5)) / 10_000 < 2e-6

    def wait() -> None:
        with heartbeat.waiting("x"):
            pass

    assert min(timeit.repeat(wait, number=10_000, repeat=5)) / 10_000 < 10e-6


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
    with program(tmp_path, code, RANK="3") as process:
        published(tmp_path, count=7)
        one = wait_until(lambda: (found := published(tmp_path, count=7)).reports and found)
        assert (one.name, one.pid, one.count) == ("trainer-3", process.pid, 7)
        assert one.reports == {"queues": {"running": 3}, "broken": {"error": "ZeroDivisionError('division by zero')"}}
        assert [(wait.what, wait.on, wait.pid, wait.is_main) for wait in one.waits] == [
            ("the inner", "ranks", None, True),
            ("a worker", "reward", 42, False),
        ]
        assert one.moved <= one.published <= time.monotonic() and one.waits[0].since < one.published
    assert read_progress(tmp_path / "progress") == {}, "the dead publish nothing"


def test_waits_end_also_by_errors_and_decorate_functions() -> None:
    before = heartbeat._current_waits()

    @heartbeat.waiting("a decorated function", on="disk")
    def read(depth: int) -> list[str]:
        return read(depth - 1) if depth else [wait["what"] for wait in heartbeat._current_waits() if wait["is_main"]]

    assert read(3) == ["a decorated function"] and read.__name__ == "read"
    with pytest.raises(KeyError), heartbeat.waiting("x"):
        raise KeyError
    assert heartbeat._current_waits() == before


def test_waits_of_several_threads_do_not_mix() -> None:
    barrier, ends = threading.Barrier(9), threading.Event()

    def wait(index: int) -> None:
        with heartbeat.waiting("outer"), heartbeat.waiting(f"thread {index}"):
            barrier.wait()
            ends.wait()

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    barrier.wait()
    seen = {one["what"] for one in heartbeat._current_waits()}
    ends.set()
    for thread in threads:
        thread.join()
    assert seen >= {f"thread {index}" for index in range(8)} and "outer" not in seen


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
        one = published(tmp_path, count=1)
        wait_until(lambda: time.monotonic() - published(tmp_path, count=1).published > 2)
        (path,) = (tmp_path / "stacks").glob(f"*.{identity(process.pid)}.txt")
        assert catches(process.pid, heartbeat.STACKS_SIGNAL)
        process.send_signal(heartbeat.STACKS_SIGNAL)
        text = wait_until(path.read_text)
        wait_until(lambda: "in <module>" in path.read_text())
        text = path.read_text()
    lines = stacks_of(text)[one.main_thread]
    assert [line.function for line in lines if line.file == "<string>"] == ["stuck", "<module>"]


def test_the_signal_is_not_sent_to_processes_that_would_die_of_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not catches(process.pid, heartbeat.STACKS_SIGNAL)
    assert not catches(process.pid, heartbeat.STACKS_SIGNAL), "nor to the dead"


def test_a_full_disk_does_not_silence_it(tmp_path: Path) -> None:
    """The file has its final size from the start: growing is what a full disk forbids."""
    code = """
import resource
heartbeat.tick()
time.sleep(0.2)
resource.setrlimit(resource.RLIMIT_FSIZE, (heartbeat.FILE_BYTES, heartbeat.FILE_BYTES))
while True:
    heartbeat.tick()
    time.sleep(0.01)
"""
    with program(tmp_path, code):
        first = published(tmp_path, count=30)
        assert published(tmp_path, count=first.count + 30).pid == first.pid
        (path,) = (tmp_path / "progress").iterdir()
        assert path.stat().st_size == heartbeat.FILE_BYTES


def test_reports_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    code = "heartbeat.report('long', lambda: 'x' * 100_000)\nheartbeat.tick()\ntime.sleep(60)"
    with program(tmp_path, code):
        one = wait_until(lambda: (found := published(tmp_path, count=1)).reports and found)
        assert "bytes are too long" in one.reports["error"]


def test_torn_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / f"a.{identity(os.getpid())}.json").write_text(json.dumps({"name": "a"}))
    (tmp_path / f"b.{os.getpid()}-0.json").write_text("{}")
    assert read_progress(tmp_path) == {}


def test_a_thread_without_the_memory_to_begin_ends_the_process(tmp_path: Path) -> None:
    """glibc keeps the stacks of ended threads, so the kernel starts the next one, in which no Python can run."""
    code = """
import resource
ended = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(3)]
for thread in ended: thread.start()
for thread in ended: thread.join()
heartbeat.start()
time.sleep(0.5)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size // 2, resource.RLIM_INFINITY))  # nothing more, whatever is freed
for _ in range(3): threading.Thread(target=time.sleep, args=(60,)).start()
"""
    environment = os.environ | {heartbeat.FOLDER_VARIABLE: str(tmp_path / "progress")}
    run = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1
    assert "memory ran out: a thread was started and lacks" in run.stderr or "can't start new thread" in run.stderr
    assert "heartbeat.py" not in run.stderr

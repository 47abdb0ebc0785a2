"""Processes are found and ended with all their descendants."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from testing_processes import spawn

from arealite.utils import processes
from arealite.utils.processes import (
    QuietCollector,
    adopt_orphans,
    descendants,
    describe_exit,
    exit_status,
    is_alive,
    kill_tree,
    send_signal,
    wait_gone,
)

TREE = """
import subprocess, sys
sleep = "import time; print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def spawn_tree() -> tuple[subprocess.Popen[bytes], int]:
    process = spawn([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        return process, int(output.readline())


def test_zombies_are_gone():
    process = spawn([sys.executable, "-c", "pass"])
    assert wait_gone([process.pid], timeout_s=120) == set()
    os.kill(process.pid, 0)  # still in the process table
    assert not is_alive(process.pid)
    assert process.pid not in descendants(os.getpid())
    assert process.wait() == 0
    assert not is_alive(process.pid)
    send_signal(process.pid, signal.SIGTERM)


def test_descendants_cross_sessions():
    process, grandchild = spawn_tree()
    assert descendants(process.pid) == [grandchild]
    assert {process.pid, grandchild} <= set(descendants(os.getpid()))
    kill_tree(process.pid)
    assert not is_alive(process.pid) and not is_alive(grandchild)
    assert process.wait() == -signal.SIGKILL


def test_wait_gone_keeps_its_deadline():
    process = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
    started = time.monotonic()
    assert wait_gone([process.pid], timeout_s=0.2) == {process.pid}
    assert time.monotonic() - started >= 0.2
    kill_tree(process.pid)
    assert process.wait() == -signal.SIGKILL


def test_adopted_orphans_become_children():
    before = adopt_orphans()
    try:
        middle = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
        process = spawn([sys.executable, "-c", middle], stdout=subprocess.PIPE)
        orphan = int(process.communicate()[0])
        assert orphan in descendants(os.getpid())
        kill_tree(orphan)
        assert os.waitpid(orphan, 0) == (orphan, signal.SIGKILL)
    finally:
        assert adopt_orphans(before)


def test_exit_descriptions():
    assert (exit_status(7), exit_status(-9)) == (7, 137)
    assert describe_exit(1) == "exit status 1"
    assert describe_exit(139) == "exit status 139 (SIGSEGV)"
    assert describe_exit(255) == "exit status 255"


class Loop:
    """Garbage that only the collector can find."""

    num_alive = 0

    def __init__(self) -> None:
        self.me = self
        Loop.num_alive += 1

    def __del__(self) -> None:
        Loop.num_alive -= 1


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_old_garbage_is_collected_at_most_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = QuietCollector()
    Loop()
    collector.collect()
    assert Loop.num_alive == 1, "a minute has not passed"
    monkeypatch.setattr(processes, "_COLLECT_S", 0.0)
    collector.collect()
    assert Loop.num_alive == 0


def test_no_full_collection_happens_by_itself() -> None:
    QuietCollector()
    before = gc.get_stats()[2]["collections"]
    kept = [[index] for index in range(3_000_000)]  # more than the default takes to look at everything
    assert gc.get_stats()[2]["collections"] == before and len(kept) == 3_000_000

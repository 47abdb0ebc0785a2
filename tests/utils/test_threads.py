"""Threads that hold nothing up: calls run side by side up to a number, and none keeps its process alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from arealite.utils.threads import DaemonThreads, in_thread


@pytest.fixture
def threads():
    threads = DaemonThreads(3, "test-call")
    yield threads
    threads.shutdown()
    deadline = time.monotonic() + 120
    while any(thread.name == "test-call" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_results_and_errors_arrive(threads: DaemonThreads) -> None:
    assert [one.result(120) for one in [threads.submit(divmod, 7, n) for n in range(1, 20)]][1] == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(120)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(120)
    assert threads.submit(sorted, [1, 2], reverse=True).result(120) == [2, 1], "the threads go on"


def test_so_many_calls_run_at_once_and_no_more(threads: DaemonThreads) -> None:
    both, may_end, running = threading.Barrier(4), threading.Event(), []

    def meet() -> None:
        running.append(threading.current_thread())
        both.wait(120)
        may_end.wait(120)

    calls = [threads.submit(meet) for _ in range(3)]
    later = threads.submit(threading.current_thread)
    both.wait(120)
    assert len(set(running)) == 3 and not later.done()
    may_end.set()
    assert later.result(120) in running and [one.result(120) for one in calls] == [None] * 3


def test_a_thread_that_is_free_is_used_again(threads: DaemonThreads) -> None:
    assert len({threads.submit(threading.current_thread).result(120) for _ in range(20)}) <= 2


def test_what_is_cancelled_before_it_runs_does_not_run(threads: DaemonThreads) -> None:
    may_end, ran = threading.Event(), []
    for _ in range(3):
        threads.submit(may_end.wait, 120)
    waiting = threads.submit(ran.append, "cancelled")
    assert waiting.cancel()
    may_end.set()
    threads.submit(ran.append, "last").result(120)
    assert ran == ["last"]


async def test_a_call_of_our_own_needs_no_free_thread(threads: DaemonThreads) -> None:
    asyncio.get_running_loop().set_default_executor(threads)
    may_end = threading.Event()
    users = [asyncio.create_task(asyncio.to_thread(may_end.wait, 600)) for _ in range(10)]
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        assert await in_thread(lambda: 7) == 7
    may_end.set()
    assert await asyncio.gather(*users) == [True] * 10


@pytest.mark.parametrize("call", ["asyncio.to_thread(block)", "in_thread(block)"])
def test_a_call_that_never_returns_does_not_keep_a_process_alive(call: str) -> None:
    code = f"""
import asyncio, threading
from arealite.utils.threads import DaemonThreads, in_thread

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads(2, "call"))
    began = threading.Event()

    def block():
        began.set()
        threading.Event().wait()

    calls = [asyncio.create_task({call}) for _ in range(5)]
    await asyncio.sleep(0)
    began.wait()

asyncio.run(main())
print("over")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")

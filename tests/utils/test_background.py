"""Failed background tasks are reported once, without what they sent; threads keep no process alive."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time

import aiohttp
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from arealite.utils.background import MAX_IDLE, BackgroundTasks, DaemonThreads, gathered, in_thread

logger = logging.getLogger("arealite.test")
SECRET = "0123456789abcdef"


async def fail_with_the_secret() -> None:
    """Raise what aiohttp raises for a bad reply; its repr shows the headers of the request."""
    headers = CIMultiDictProxy(CIMultiDict(Authorization=f"Bearer {SECRET}"))
    request = aiohttp.RequestInfo(URL("http://127.0.0.1:1"), "GET", headers, URL("http://127.0.0.1:1"))
    raise aiohttp.ClientResponseError(request, (), status=404)


async def until(tasks: BackgroundTasks) -> None:
    async with asyncio.timeout(120):
        while tasks.error is None:
            await asyncio.sleep(0.001)


async def test_a_failure_is_logged_once_without_the_secret_and_raised_to_the_owner(caplog) -> None:
    tasks = BackgroundTasks("what a server does", logger)
    with caplog.at_level(logging.DEBUG):
        tasks.start(fail_with_the_secret())
        await until(tasks)
        gc.collect()  # asyncio reports a task whose error nobody took, with the repr of the error
    assert isinstance(tasks.error, aiohttp.ClientResponseError) and SECRET in repr(tasks.error)
    (record,) = [one for one in caplog.records if one.name == "arealite.test"]
    assert record.levelno == logging.ERROR and "what a server does" in record.getMessage()
    assert "404" in caplog.text and "fail_with_the_secret" in caplog.text and SECRET not in caplog.text
    for _ in range(2):
        with pytest.raises(RuntimeError, match="what a server does must not fail: got ClientResponseError") as raised:
            tasks.check()
        assert raised.value.__cause__ is tasks.error


async def test_the_owner_is_woken_and_the_first_failure_stays(caplog) -> None:
    woken = asyncio.Event()
    tasks = BackgroundTasks("work", logger, on_failure=woken.set)

    async def fail(number: int) -> None:
        raise GeneratorExit(number)

    for number in range(2):
        tasks.start(fail(number))
        async with asyncio.timeout(120):
            await woken.wait()
        woken.clear()
    assert isinstance(tasks.error, GeneratorExit) and tasks.error.args == (0,)
    assert len(caplog.records) == 2, "each failure is logged"


async def test_of_tasks_with_one_key_one_runs() -> None:
    tasks, may_end, started = BackgroundTasks("work", logger), asyncio.Event(), []

    async def work(name: str) -> None:
        started.append(name)
        await may_end.wait()
        if name == "first":
            tasks.start(work("while the first runs"), "key")

    async def take_over() -> None:
        await may_end.wait()  # wakes after the first task has ended, and before its callbacks have run
        tasks.start(work("as soon as it has ended"), "key")

    tasks.start(work("first"), "key")
    tasks.start(work("refused"), "key")
    tasks.start(work("another key"), "other")
    await asyncio.sleep(0)
    assert started == ["first", "another key"]
    tasks.start(take_over())
    await asyncio.sleep(0)
    may_end.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert started == ["first", "another key", "as soon as it has ended"]
    tasks.check()


async def test_the_first_error_cancels_what_is_gathered_beside_it() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fail() -> None:
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        await gathered([wait(), fail()])
    async with asyncio.timeout(60):
        await cancelled.wait()


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


def test_calls_that_queued_for_a_thread_all_run(threads: DaemonThreads) -> None:
    may_begin = threading.Event()
    calls = [threads.submit(may_begin.wait)] + [threads.submit(int) for _ in range(4 * MAX_IDLE)]
    may_begin.set()
    assert [call.result(60) for call in calls] == [True] + [0] * 4 * MAX_IDLE


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
from arealite.utils.background import DaemonThreads, in_thread

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


async def test_calls_take_an_idle_thread_and_never_wait_for_one() -> None:
    """Starting a thread takes ten times as long as waking one, and an episode makes two calls per turn."""
    threads = {await in_thread(threading.get_ident) for _ in range(20)}
    assert len(threads) < 20, "one that has just ended a call may not count as idle yet"
    together = threading.Barrier(40)
    await asyncio.gather(*(in_thread(together.wait, 60) for _ in range(40)))
    async with asyncio.timeout(60):
        while sum(one.name == "call" for one in threading.enumerate()) > MAX_IDLE:
            await asyncio.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    asyncio.run(in_thread(threading.get_ident))
    if (child := os.fork()) == 0:
        os._exit(asyncio.run(asyncio.wait_for(in_thread(lambda: 7), 60)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

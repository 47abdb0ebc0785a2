"""The loop whose clock jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from arealite.simulate.virtual import DeadlockError, VirtualLoop, VirtualLoopThread
from arealite.utils.background import in_thread


@pytest.fixture
def thread() -> Iterator[VirtualLoopThread]:
    thread = VirtualLoopThread(VirtualLoop())
    yield thread
    thread.close(1.0)
    thread.loop.close()


def test_time_is_the_sum_of_what_is_slept(thread: VirtualLoopThread) -> None:
    async def sleep() -> float:
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(1800.0))
        return asyncio.get_running_loop().time()

    assert thread.run(sleep()) == 3600.0
    thread.run(asyncio.sleep(0.5))
    assert thread.loop.time() == 3600.5


def test_who_waits_for_a_result_turns_the_loop_no_longer_than_asked(thread: VirtualLoopThread) -> None:
    pending = thread.submit(asyncio.sleep(10.0, "done"))
    with pytest.raises(TimeoutError):
        pending.result(timeout=4.0)
    assert thread.loop.time() == 4.0
    assert pending.result(timeout=100.0) == "done" and thread.loop.time() == 10.0


def test_an_error_and_a_cancelled_task_reach_who_waits(thread: VirtualLoopThread) -> None:
    async def fail() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        thread.run(fail())
    pending = thread.submit(asyncio.sleep(10.0))
    pending.cancel()
    assert pending.cancelled()
    thread.run(asyncio.sleep(1.0))
    assert asyncio.all_tasks(thread.loop) == set()


def test_an_error_of_a_callback_is_not_only_logged(thread: VirtualLoopThread) -> None:
    thread.loop.call_later(1.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        thread.run(asyncio.sleep(2.0))


def test_a_wait_for_nothing_that_is_to_come_is_a_deadlock(thread: VirtualLoopThread) -> None:
    thread.run(asyncio.sleep(7.0))
    with pytest.raises(DeadlockError, match=r"got neither at 7\.000 virtual s"):
        thread.run(asyncio.Event().wait())


def test_calls_in_threads_take_no_time(thread: VirtualLoopThread) -> None:
    assert thread.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        thread.run(in_thread(divmod, 7, 0))
    assert thread.loop.time() == 0.0

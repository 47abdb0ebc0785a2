"""What rewards, environments and agents rely on: see also tests/reward/test_reward_runner.py."""

import asyncio
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from arealite.utils.processes import is_alive
from arealite.utils.worker_process import CallError, WorkerPool, WorkerProcess, pickle_target


@pytest.fixture
def pool_of() -> Iterator[Callable[..., WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(function: Callable[..., Any], **options: Any) -> WorkerPool:
        pools.append(WorkerPool(pickle_target(function, "function", what="it"), name="test", **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_outlives_the_thread_that_started_it(pool_of) -> None:
    pool, workers = pool_of(os.getpid), []
    thread = threading.Thread(target=lambda: workers.append(pool.take()))
    thread.start()
    thread.join()
    (worker,) = workers
    assert worker.call(timeout_s=60) == worker.process.pid
    time.sleep(0.1)
    assert worker.call(timeout_s=60) == worker.process.pid


def test_only_its_caller_closes_the_connection_of_a_process_whose_pool_closes(pool_of) -> None:
    """A second thread would close the number of a file that may be another's by then."""
    before, pool = num_files(), pool_of(os.getpid)
    taken, idle = pool.take(), pool.take()
    pool.give_back(idle)
    pool.close()
    assert not taken._connection.closed and not any(is_alive(one.process.pid) for one in (taken, idle))
    del idle
    pool.give_back(taken)
    assert taken._connection.closed and num_files() == before


def test_a_failure_has_its_last_line_and_its_frames(pool_of) -> None:
    worker = pool_of(operator.getitem).take()
    with pytest.raises(CallError) as caught:
        worker.call(({}, "left"), timeout_s=60)
    assert caught.value.summary == "KeyError: 'left'" and worker.is_usable
    assert worker.call(([7], 0), timeout_s=60) == 7


def test_after_a_deadline_the_process_is_replaced_and_nothing_is_left(pool_of) -> None:
    pool = pool_of(time.sleep)
    pool.give_back(pool.take())
    before, pids = num_files(), []
    for _ in range(3):
        worker = pool.take()
        pids.append(worker.process.pid)
        assert worker.call((0,), timeout_s=60) is None
        with pytest.raises(TimeoutError):
            worker.call((600,), timeout_s=0.05)
        assert not worker.is_usable
        pool.give_back(worker)
    pool.give_back(pool.take())
    assert num_files() == before and len({*pids}) == 3 and not any(map(is_alive, pids))
    pool.close()
    assert num_files() < before
    with pytest.raises(RuntimeError, match=r"must be open: got a call after close\(\)"):
        pool.take()


async def test_a_cancelled_caller_ends_its_process(pool_of) -> None:
    worker: WorkerProcess = pool_of(time.sleep).take()
    assert await worker.acall((0,)) is None
    call = asyncio.create_task(worker.acall((600,)))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not is_alive(worker.process.pid)

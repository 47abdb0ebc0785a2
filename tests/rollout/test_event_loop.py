"""The loop of a thread, with workflows that block it: found while they block, named by line, and waited for in vain no
longer than allowed."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import re
import resource
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import testing_forks
from tensordict import TensorDict
from testing_workflows import IdleEngine, WaitingWorkflow

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.api.script import SourceLine
from arealite.rollout import event_loop
from arealite.rollout.event_loop import EventLoopThread
from arealite.utils.background import in_thread


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread("test-loop", blocking_call_s=0.2, max_blocked_s=60)
    yield loop
    loop.close(5)


def block(until: threading.Event, seconds: float) -> None:
    until.wait(seconds)  # guilty


async def block_in_a_coroutine(until: threading.Event, seconds: float) -> None:
    block(until, seconds)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def turn(loop: EventLoopThread) -> None:
    """Let the loop do everything that can be done at once."""
    for _ in range(20):
        loop.run(asyncio.sleep(0))


def line_of(function: object, text: str) -> str:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return f"{__file__}:{first + next(index for index, line in enumerate(lines) if text in line)} in "


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of asyncio's own half a loop
def test_a_loop_that_finds_no_file_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            EventLoopThread("test-loop")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()


def test_a_blocking_call_is_reported_once_per_line_while_it_blocks(loop, caplog) -> None:
    ended = threading.Event()
    with caplog.at_level(logging.WARNING, logger="arealite.rollout"):
        blocked = loop.submit(block_in_a_coroutine(ended, 120))
        wait_for(lambda: loop.watch.blocking is not None)
        assert not blocked.done(), "it is found while it blocks"
        assert str(loop.watch.blocking).startswith(line_of(block, "until.wait"))
        ended.set()
        blocked.result(120)
        loop.run(block_in_a_coroutine(threading.Event(), 0.5))
    (message,) = [text for text in caplog.messages if " in block blocks " in text]
    found = re.fullmatch(r"(.*) in block blocks the rollout loop for (\d+\.\d) s already: .*", message)
    assert found is not None and float(found[2]) >= 0.2
    assert f"{found[1]} in " == line_of(block, "until.wait")
    wait_for(lambda: loop.watch.blocking is None)


def test_a_call_without_a_line_of_the_users_is_reported_after_seconds(loop, caplog, monkeypatch) -> None:
    ended = threading.Event()
    with caplog.at_level(logging.DEBUG, logger="arealite.rollout"):
        loop.call_soon(functools.partial(ended.wait, 120))  # as a callback of ours, in threading.py
        wait_for(lambda: loop.watch.describe()["overdue_s"] > 1.0)
        assert loop.watch.blocking is None and not caplog.records
        monkeypatch.setattr(event_loop, "_NOT_USERS_S", 0.0)
        wait_for(lambda: bool(caplog.records))
        ended.set()
    (message,) = caplog.messages
    assert "/arealite/rollout/event_loop.py:" in message and "threading.py" not in message


def test_the_lag_is_a_metric(loop) -> None:
    loop.run(asyncio.sleep(0.5))
    quiet = loop.watch.metrics()
    assert set(quiet) == {"perf/loop_lag_p99_s", "perf/loop_lag_max_s"}
    assert 0 <= quiet["perf/loop_lag_p99_s"] <= quiet["perf/loop_lag_max_s"]
    began = time.monotonic()
    loop.run(block_in_a_coroutine(threading.Event(), 0.6))
    loop.run(asyncio.sleep(0.1))
    longest_s = quiet["perf/loop_lag_max_s"] + time.monotonic() - began
    assert 0.5 <= loop.watch.metrics()["perf/loop_lag_max_s"] <= longest_s
    ended = threading.Event()
    blocked = loop.submit(block_in_a_coroutine(ended, 120))
    wait_for(lambda: loop.watch.metrics()["perf/loop_lag_max_s"] >= 0.4)
    assert not blocked.done(), "a call that still blocks counts"
    ended.set()
    blocked.result(120)


def test_an_idle_or_busy_loop_is_not_blocked(caplog) -> None:
    loop = EventLoopThread("test-loop", blocking_call_s=0.6, max_blocked_s=60)

    async def work_in_pieces() -> None:
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING, logger="arealite.rollout"):
        loop.run(work_in_pieces())
        loop.run(asyncio.sleep(1.2))
    loop.close(120)
    assert not caplog.records


def test_a_loop_that_is_late_in_asyncio_is_not_blocked(loop, caplog, monkeypatch) -> None:
    """Between two calls that block, the stack may have only lines of asyncio."""
    looks, ended = [], threading.Event()

    def look(_: object) -> list[SourceLine]:
        looks.append(1)
        return [SourceLine(f"{sysconfig.get_path('stdlib')}/selectors.py", 1, "register")]

    monkeypatch.setattr(event_loop, "lines_of_frame", look)
    with caplog.at_level(logging.DEBUG, logger="arealite.rollout"):
        blocked = loop.submit(block_in_a_coroutine(ended, 120))
        wait_for(lambda: len(looks) >= 5)
        ended.set()
        blocked.result(120)
    assert not caplog.records and loop.watch.blocking is None


def test_waiting_for_a_blocked_loop_ends() -> None:
    loop = EventLoopThread("blocked-loop", blocking_call_s=0.1, max_blocked_s=0.7)
    ended = threading.Event()

    async def wait_in_vain() -> None:
        ended.wait(120)

    line = re.escape(line_of(wait_in_vain, "ended.wait"))
    with pytest.raises(EpisodeTimeoutError, match=f"must turn within 0.7 s: {line}.*wait_in_vain blocks it"):
        loop.run(wait_in_vain())
    with pytest.raises(EpisodeTimeoutError):
        loop.run(asyncio.sleep(0))
    ended.set()
    loop.close(10)


def test_a_loop_that_waits_for_cpu_time_is_not_given_up(monkeypatch) -> None:
    looks, ended = [], threading.Event()

    def look(_: object) -> list[SourceLine]:
        looks.append(1)
        return [SourceLine("selectors.py", 1, "EpollSelector.select")]

    loop = EventLoopThread("starved-loop", blocking_call_s=1.0, max_blocked_s=0.2)
    monkeypatch.setattr(event_loop, "lines_of_frame", look)
    late = loop.submit(_wait(ended))
    wait_for(lambda: len(looks) >= 5)  # each after 0.2 s
    assert loop.watch.blocking is None and not loop.watch.given_up.done()
    ended.set()
    late.result(120)
    loop.close(10)


def test_closing_a_blocked_loop_names_the_line(caplog) -> None:
    loop = EventLoopThread("blocked-loop", blocking_call_s=0.1)
    ended = threading.Event()
    loop.submit(_wait(ended))
    wait_for(lambda: loop.watch.blocking is not None)
    with caplog.at_level(logging.WARNING, logger="arealite.rollout"):
        loop.close(0.1)
    assert f"did not end within 0.1 s: {line_of(_wait, 'ended.wait')}_wait blocks it" in caplog.text
    ended.set()


async def _wait(ended: threading.Event) -> None:
    ended.wait(120)


# Ends


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_loop_that_a_task_ends_closes_what_it_has(error: type[BaseException]) -> None:
    """Also while it is being closed, and if tasks do not end as asked."""
    loop = EventLoopThread("test-loop")
    is_closing, closed = threading.Event(), []

    async def fail() -> None:
        raise LookupError

    async def close() -> None:
        is_closing.set()
        await asyncio.sleep(0.5)
        closed.append("closed")

    async def raise_when_cancelled() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise error

    async def end() -> None:
        raise error("by a workflow")

    async def await_another(coroutine) -> None:
        other = asyncio.create_task(coroutine)
        other.add_done_callback(asyncio.Task.exception)
        await asyncio.sleep(3600)
        await other

    loop.closers += [fail, close]
    loop.submit(raise_when_cancelled())
    turn(loop)
    with pytest.raises(RuntimeError, match="has ended") as caught:
        loop.run(await_another(end()))
    assert isinstance(caught.value.__cause__, error) and str(caught.value.__cause__) == "by a workflow"
    assert is_closing.wait(120)
    loop.close(120)
    assert closed == ["closed"]
    with pytest.raises(RuntimeError, match="has ended"):
        loop.run(asyncio.sleep(0))
    assert not {loop._thread, loop.watch._thread} & set(threading.enumerate())


class Stuck(WaitingWorkflow):
    """Calls what never returns, from more threads than there are."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        await asyncio.gather(*(asyncio.to_thread(threading.Event().wait) for _ in range(100)))
        return None


def train_in_vain(pipe: Connection) -> None:
    """Finish a run as a trainer does, while calls of its workflow still run."""
    config = InferenceEngineConfig(consumer_batch_size=1, episode_timeout=3.0, episode_retries=0, max_failed_share=0)
    executor = IdleEngine(config).executor
    try:
        executor.prepare_batch([[{}]], Stuck())
    except EpisodeError as error:
        pipe.send(str(error))
    pipe.send(executor.loop.run(in_thread(lambda: "a call of our own runs")))
    executor.close()
    pipe.send("the end")


def test_calls_in_threads_that_never_return_hold_up_nothing() -> None:
    with testing_forks.connected(train_in_vain) as trainer:
        assert "1 x timeout" in trainer.receive()
        assert trainer.receive() == "a call of our own runs"
        assert trainer.receive() == "the end"
        assert trainer.end() == 0, "it ends"

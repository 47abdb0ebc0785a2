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
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import testing_forks
from tensordict import TensorDict
from testing_client import until
from testing_workflows import IdleEngine, WaitingWorkflow

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.api.script import SourceLine
from arealite.reward.runner import RewardRunner
from arealite.rollout import event_loop
from arealite.rollout.event_loop import NUM_SHOWN, Activity, EventLoopThread
from arealite.utils import trace
from arealite.utils.background import in_thread


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread("test-loop", blocking_call_s=0.2, max_blocked_s=60)
    yield loop
    loop.close(5)


def block(ended: threading.Event, seconds: float) -> None:
    ended.wait(seconds)


async def block_in_a_coroutine(ended: threading.Event, seconds: float) -> None:
    block(ended, seconds)


def turn(loop: EventLoopThread) -> None:
    """Let the loop do everything that can be done at once."""
    for _ in range(20):
        loop.run(asyncio.sleep(0))


def line_of(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    number = first + next(index for index, line in enumerate(lines) if text in line)
    return f"{__file__}:{number} in {function.__qualname__}"


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
        until(lambda: loop.watch.blocking is not None)
        assert not blocked.done(), "it is found while it blocks"
        assert str(loop.watch.blocking).startswith(line_of(block, "ended.wait"))
        ended.set()
        blocked.result(120)
        loop.run(block_in_a_coroutine(threading.Event(), 0.5))
    (message,) = [text for text in caplog.messages if " in block blocks " in text]
    found = re.fullmatch(r"(.*) in block blocks the rollout loop for (\d+\.\d) s already: .*", message)
    assert found is not None and float(found[2]) >= 0.2
    assert f"{found[1]} in block" == line_of(block, "ended.wait")
    until(lambda: loop.watch.blocking is None)


def test_a_call_without_a_line_of_the_users_is_reported_after_seconds(loop, caplog, monkeypatch) -> None:
    ended = threading.Event()
    with caplog.at_level(logging.DEBUG, logger="arealite.rollout"):
        loop.call_soon(functools.partial(ended.wait, 120))  # as a callback of ours, in threading.py
        until(lambda: loop.watch.describe()["overdue_s"] > 1.0)
        assert loop.watch.blocking is None and not caplog.records
        monkeypatch.setattr(event_loop, "_NOT_USERS_S", 0.0)
        until(lambda: bool(caplog.records))
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
    until(lambda: loop.watch.metrics()["perf/loop_lag_max_s"] >= 0.4)
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


def test_waiting_for_a_blocked_loop_ends() -> None:
    loop = EventLoopThread("blocked-loop", blocking_call_s=0.1, max_blocked_s=0.7)
    ended = threading.Event()

    async def wait_in_vain() -> None:
        ended.wait(120)

    line = re.escape(line_of(wait_in_vain, "ended.wait"))
    with pytest.raises(EpisodeTimeoutError, match=f"must turn within 0.7 s: {line} blocks it"):
        loop.run(wait_in_vain())
    with pytest.raises(EpisodeTimeoutError):
        loop.run(asyncio.sleep(0))
    ended.set()
    loop.close(10)


@pytest.mark.parametrize("function", ["EpollSelector.select", "register"])
def test_a_loop_that_is_late_in_asyncio_is_neither_blocked_nor_given_up(function: str, caplog, monkeypatch) -> None:
    """It waits for CPU time, or is between two calls that block."""
    looks, ended = [], threading.Event()

    def look(_: object) -> list[SourceLine]:
        looks.append(1)
        return [SourceLine(f"{sysconfig.get_path('stdlib')}/selectors.py", 1, function)]

    loop = EventLoopThread("late-loop", blocking_call_s=0.2, max_blocked_s=0.2)
    monkeypatch.setattr(event_loop, "lines_of_frame", look)
    with caplog.at_level(logging.DEBUG, logger="arealite.rollout"):
        late = loop.submit(_wait(ended))
        until(lambda: len(looks) >= 5)
        assert loop.watch.blocking is None and not loop.watch.given_up.done()
        ended.set()
        late.result(120)
    loop.close(10)
    assert not caplog.records


def test_closing_a_blocked_loop_names_the_line(caplog) -> None:
    loop = EventLoopThread("blocked-loop", blocking_call_s=0.1)
    ended = threading.Event()
    loop.submit(_wait(ended))
    until(lambda: loop.watch.blocking is not None)
    with caplog.at_level(logging.WARNING, logger="arealite.rollout"):
        loop.close(0.1)
    assert f"did not end within 0.1 s: {line_of(_wait, 'ended.wait')} blocks it" in caplog.text
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


# The lines at which episodes await, and the division of a wait among what they do


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
def clock(activity: Activity, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(activity, "clock", lambda: now[0])
    return now


async def test_each_second_is_that_of_the_episodes_that_run(activity: Activity, clock: list[float]) -> None:
    go = [asyncio.Event() for _ in range(4)]

    async def two_samples() -> None:
        with activity.episode("a"):
            await asyncio.gather(sample(go[0]), sample(go[1]))
            await go[2].wait()

    async def sample(may_end: asyncio.Event) -> None:
        with trace.phase("servers"):
            await may_end.wait()
        with trace.phase("reward"):
            await go[2].wait()

    async def calls_a_tool() -> None:
        with activity.episode("b"):
            await go[3].wait()

    tasks = [asyncio.create_task(two_samples()), asyncio.create_task(calls_a_tool())]

    async def after(seconds: float, event: asyncio.Event | None = None) -> None:
        await asyncio.sleep(0)
        clock[0] += seconds
        if event is not None:
            event.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    await after(100.0)  # nobody waits
    with activity.waiting(lambda: 3):
        await after(2.0, go[0])  # one episode is in servers, though a sample of it is in its reward from now on
        await after(4.0, go[1])  # both samples are in their rewards from now on
        await after(6.0, go[2])
        await after(8.0, go[3])  # the one that calls a tool is alone
        await asyncio.gather(*tasks)
        await after(50.0)  # nothing runs
    found = activity.take_waits()
    assert {kind: seconds for kind, seconds in found.items() if seconds} == {
        "servers": 3.0, "reward": 3.0, "workflow": 1.0 + 2.0 + 3.0 + 8.0
    }  # fmt: skip
    assert activity.take_waits() == {}


@pytest.mark.parametrize(("slots", "kind"), [(1, "servers_full"), (2, "servers"), (None, "servers")])
async def test_as_many_requests_as_slots_fill_the_servers(
    activity: Activity, clock: list[float], slots: int | None, kind: str
) -> None:
    with activity.episode("a"), trace.phase("servers"), activity.waiting(lambda: slots):
        clock[0] += 5.0
    assert {name: seconds for name, seconds in activity.take_waits().items() if seconds} == {kind: 5.0}


async def test_a_task_that_an_episode_leaves_behind_counts_no_more(activity: Activity, clock: list[float]) -> None:
    go = asyncio.Event()

    async def request() -> None:
        with trace.phase("servers"):
            await go.wait()

    with activity.episode("a"):
        left = asyncio.create_task(request())
        await asyncio.sleep(0)
    with activity.episode("b"), activity.waiting(lambda: None):
        clock[0] += 5.0
        go.set()
        await left
        clock[0] += 1.0
    assert activity.take_waits() == {"workflow": 6.0, "servers": 0.0}


async def wait_for_ever() -> None:
    await asyncio.Event().wait()  # inner


async def call_another() -> None:
    await wait_for_ever()


async def gather_some() -> None:
    await asyncio.gather(asyncio.sleep(0), wait_for_ever())  # gather


async def await_a_library() -> None:
    async with asyncio.timeout(120):
        await asyncio.wait_for(asyncio.shield(asyncio.Event().wait()), 30)  # library


async def iterate() -> None:
    async for _ in steps():
        pass


async def steps():
    yield 1
    await wait_for_ever()


async def episode(activity: Activity, name: str, coroutine) -> None:
    with activity.episode(name):
        await coroutine


@pytest.mark.parametrize(
    ("coroutine", "function", "text"),
    [
        (call_another, wait_for_ever, "# inner"),
        (gather_some, gather_some, "# gather"),
        (await_a_library, await_a_library, "# library"),
        (iterate, iterate, "async for"),
    ],
)
def test_the_line_that_an_episode_awaits_at(loop, activity, coroutine, function, text) -> None:
    running = loop.submit(episode(activity, "0-7", coroutine()))
    turn(loop)
    (found,) = activity.oldest()
    running.cancel()
    assert found["name"] == "0-7" and found["on"] == "workflow" and 0 < found["for_s"] < 120
    assert found["line"] == line_of(function, text)
    turn(loop)
    assert activity.oldest() == []


def test_the_oldest_episodes_come_first(loop, activity) -> None:
    names = [f"0-{index}" for index in range(NUM_SHOWN + 5)]
    running = [loop.submit(episode(activity, name, wait_for_ever())) for name in names]
    turn(loop)
    assert [one["name"] for one in activity.oldest()] == names[:NUM_SHOWN]
    for one in running:
        one.cancel()


def test_looking_from_another_thread_never_fails(loop, activity) -> None:
    """Episodes come and go while a thread looks, as the heartbeat does; that once ended the process by SIGSEGV."""

    async def short() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [loop.submit(episode(activity, str(index), short())) for index in range(2000)]
        while not all(one.done() for one in running):
            assert all(one["line"] for one in activity.oldest())
    finally:
        sys.setswitchinterval(usual_s)
    assert activity.oldest() == []


def test_a_reward_that_is_a_coroutine_is_named_by_its_own_line(loop, activity) -> None:
    plain, coroutine = RewardRunner(slow_reward, timeout=300), RewardRunner(slow_coroutine_reward, timeout=300)
    running = [loop.submit(episode(activity, str(one), score(one))) for one in (plain, coroutine)]
    turn(loop)
    lines = [(one["on"], one["line"].rpartition(" in ")[2]) for one in activity.oldest()]
    assert lines == [("reward", "score"), ("reward", "slow_coroutine_reward")]
    for one in running:
        one.cancel()
    plain.close()


async def score(runner: RewardRunner) -> None:
    await runner(prompt="", completions="", prompt_ids=[], completion_ids=[])


def slow_reward(prompt, completions, prompt_ids, completion_ids) -> float:
    time.sleep(600)
    return 0.0


async def slow_coroutine_reward(prompt, completions, prompt_ids, completion_ids) -> float:
    await asyncio.sleep(600)
    return 0.0

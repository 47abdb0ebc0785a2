"""The lines at which episodes await, and the division of a wait among what they do; its clock is the test's own."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator

import pytest

from arealite.reward.runner import RewardRunner
from arealite.rollout import event_loop as module
from arealite.rollout.event_loop import NUM_SHOWN, Activity, EventLoopThread
from arealite.utils import trace


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread("test-loop")
    yield loop
    loop.close(5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(f"{module.__name__}.time.monotonic", lambda: now[0])
    return now


async def test_each_second_is_that_of_the_episodes_that_run(activity: Activity, clock: list[float]) -> None:
    go = [asyncio.Event() for _ in range(4)]

    async def two_samples() -> None:
        with activity.episode("a"):
            await asyncio.gather(sample(go[0]), sample(go[1]))
            await go[2].wait()

    async def sample(until: asyncio.Event) -> None:
        with trace.phase("servers"):
            await until.wait()
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


def line_of(function: object, text: str) -> str:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    number = first + next(index for index, line in enumerate(lines) if text in line)
    return f"{__file__}:{number} in {function.__qualname__}"  # type: ignore[attr-defined]


async def episode(activity: Activity, name: str, coroutine) -> None:
    with activity.episode(name):
        await coroutine


def turn(loop: EventLoopThread) -> None:
    """Let the loop do everything that can be done at once."""
    for _ in range(20):
        loop.run(asyncio.sleep(0))


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
    """Episodes come and go while a thread looks, as the heartbeat does."""

    async def short() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    running = [loop.submit(episode(activity, str(index), short())) for index in range(2000)]
    while not all(one.done() for one in running):
        assert all(one["line"] for one in activity.oldest())
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

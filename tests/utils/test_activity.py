"""A wait is divided among what episodes do meanwhile; clocks are the test's own."""

from __future__ import annotations

import asyncio

import pytest

from arealite.utils import activity


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("arealite.utils.activity.time.monotonic", lambda: now[0])
    activity.take_waits()
    return now


async def test_each_second_is_that_of_the_episodes_that_run(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "_num_slots", lambda: 3)
    go = [asyncio.Event() for _ in range(4)]

    async def two_samples() -> None:
        with activity.episode():
            await asyncio.gather(sample(go[0]), sample(go[1]))
            await go[2].wait()

    async def sample(until: asyncio.Event) -> None:
        with activity.doing("servers"):
            await until.wait()
        with activity.doing("reward"):
            await go[2].wait()

    async def calls_a_tool() -> None:
        with activity.episode():
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
    with activity.waiting():
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


@pytest.mark.parametrize(("slots", "kind"), [(1, "servers"), (2, "servers"), (None, "servers")])
async def test_as_many_requests_as_slots_fill_the_servers(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, slots: int | None, kind: str
) -> None:
    monkeypatch.setattr(activity, "_num_slots", lambda: slots)
    with activity.episode(), activity.doing("servers"), activity.waiting():
        clock[0] += 5.0
    expected = "servers_full" if slots == 1 else kind
    assert {name: seconds for name, seconds in activity.take_waits().items() if seconds} == {expected: 5.0}

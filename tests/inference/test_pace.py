"""Slow and sick servers are drained and come back: simulated servers, in a loop whose clock jumps over every sleep."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import selectors
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from arealite.api.errors import ServerError
from arealite.inference.pace import Pace
from arealite.inference.pool import Server, ServerSet


class JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


def simulate(coroutine: Coroutine[Any, Any, None]) -> None:
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with contextlib.closing(loop):
        loop.run_until_complete(coroutine)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))


@dataclass
class Nature:
    """How fast a simulated server is, and how much more slowly it answers with every further request."""

    token_s: float = 0.01
    crowding: float = 0.05
    is_sick: bool = False


class Fleet:
    """Servers, clients that keep them busy, and a record of who was drained when."""

    def __init__(self, natures: list[Nature], seed: int = 1) -> None:
        self.servers = ServerSet([f"s{index}" for index in range(len(natures))])
        self.natures = dict(zip(self.servers.servers, natures))
        self.in_flight = dict.fromkeys(self.natures, 0)
        self.rng = random.Random(seed)
        self.changes: list[tuple[float, str, bool]] = []
        self.drained: set[Server] = set()
        self.servers.on_change = self.note
        self.pace = Pace(self.servers, self.probe)

    def note(self) -> None:
        for server in self.natures:
            if server.is_drained != (server in self.drained):
                self.drained ^= {server}
                self.changes.append((asyncio.get_running_loop().time(), server.address, server.is_drained))

    async def answer(self, server: Server, num_tokens: int) -> float:
        """Answer a request and return how long it took."""
        nature, began = self.natures[server], asyncio.get_running_loop().time()
        self.in_flight[server] += 1
        for _ in range(2):
            crowd = 1 + nature.crowding * (self.in_flight[server] - 1)
            await asyncio.sleep(num_tokens / 2 * nature.token_s * crowd * self.rng.uniform(0.7, 1.5))
        self.in_flight[server] -= 1
        if nature.is_sick:
            raise ServerError("sick")
        return asyncio.get_running_loop().time() - began

    async def probe(self, server: Server) -> float:
        return await self.answer(server, 8) / 8

    async def client(self) -> None:
        while True:
            num_tokens = self.rng.randint(4, 400)
            server = self.servers.pick(str(self.rng.random()), num_tokens)
            assert server is not None
            before = self.in_flight[server]
            try:
                seconds = await self.answer(server, num_tokens)
            except ServerError:
                self.pace.note_error(server)
            else:
                crowd = (before + self.in_flight[server]) / 2 + 1
                self.pace.note_answer(server, num_tokens=num_tokens, seconds=seconds, num_in_flight=crowd)
            finally:
                self.servers.release(server, num_tokens)

    def work(self, num_clients: int) -> None:
        self.clients = [asyncio.create_task(self.client()) for _ in range(num_clients)]


@pytest.mark.parametrize("crowding", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("num_servers", [2, 4])
def test_a_slow_server_is_drained_and_returns_when_it_is_fast(crowding: float, num_servers: int) -> None:
    async def run() -> None:
        fleet = Fleet([Nature(crowding=crowding) for _ in range(num_servers)])
        first = fleet.natures[fleet.servers.servers[0]]
        fleet.work(8 * num_servers)
        await asyncio.sleep(300)
        assert fleet.changes == [], "all are alike"
        first.token_s *= 20
        await asyncio.sleep(600)
        assert fleet.changes[0][1:] == ("s0", True) and fleet.changes[0][0] < 600
        assert [address for _, address, _ in fleet.changes] == ["s0"] * len(fleet.changes)
        num_requests = fleet.servers.servers[0].num_requests
        await asyncio.sleep(30)
        if crowding < 1:  # alone with its probe, a slow server beats crowded ones there
            assert fleet.servers.servers[0].num_requests == num_requests
        first.token_s /= 20
        await asyncio.sleep(1500)
        assert fleet.changes[-1][1:] == ("s0", False) and not fleet.drained

    simulate(run())


def test_a_server_on_the_edge_changes_sides_ever_more_rarely() -> None:
    """Slow under load and fast when idle, for ever: an hour sees a few changes, not hundreds."""

    async def run() -> None:
        fleet = Fleet([Nature(crowding=0.0), Nature(crowding=0.0), Nature(crowding=1.0)])
        fleet.work(60)
        await asyncio.sleep(3600)
        times = [time for time, _, is_drained in fleet.changes if is_drained]
        assert 2 <= len(times) <= 12
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert pauses[-1] > 4 * pauses[0]

    simulate(run())


def test_unequal_loads_are_no_reason() -> None:
    """One that joins has few requests at first: others are slower per token, but not for what they do."""

    async def run() -> None:
        fleet = Fleet([Nature(crowding=0.5) for _ in range(2)])
        newcomer = fleet.servers.servers[1]
        newcomer.is_reachable = False
        fleet.work(64)
        await asyncio.sleep(200)
        newcomer.is_reachable = True
        await asyncio.sleep(400)
        assert fleet.changes == []

    simulate(run())


def test_a_sick_server_is_drained_until_it_completes_a_probe() -> None:
    async def run() -> None:
        fleet = Fleet([Nature(), Nature()])
        sick = fleet.natures[fleet.servers.servers[0]]
        fleet.work(8)
        sick.is_sick = True
        await asyncio.sleep(100)
        assert [change[1:] for change in fleet.changes] == [("s0", True)]
        sick.is_sick = False
        await asyncio.sleep(60)
        assert [change[1:] for change in fleet.changes] == [("s0", True), ("s0", False)]

    simulate(run())


def test_the_last_server_is_never_drained() -> None:
    async def run() -> None:
        fleet = Fleet([Nature(is_sick=True), Nature(is_sick=True)])
        fleet.work(8)
        await asyncio.sleep(100)
        assert len(fleet.drained) == 1

    simulate(run())

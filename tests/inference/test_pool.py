"""Which server gets a request, also from simulated servers in a loop whose clock jumps over every sleep."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.inference.pool import ServerFacts, ServerPool, backoff_s
from arealite.simulate.virtual import VirtualLoop


def pool_of(addresses: list[str], **settings: Any) -> ServerPool:
    """Return a pool whose servers all have weights 0."""
    servers = ServerPool(**settings)
    for address in addresses:
        servers.add(address)
    servers.advance(servers.servers, 0)
    return servers


def test_the_least_loaded_server_is_picked_and_rids_stick() -> None:
    servers = pool_of(["a", "b", "c"])
    a, b, c = servers.servers
    assert [servers.pick(f"r{index}", 10) for index in range(3)] == [a, b, c]
    servers.release(b, 10)
    assert servers.pick("new", 5) is b
    assert servers.pick("r0", 100) is a
    servers.suspend(a)
    assert servers.pick("r0", 1) is b, "5 tokens against c's 10"
    servers.restore(a)
    assert servers.pick("r0", 1) is b, "it has moved"
    servers.remove("b")
    assert servers.pick("r0", 1) is c
    assert servers.pick("r0", 1, avoid={c}) is a, "also with more to do"
    assert servers.pick("r0", 1, avoid={a, c}) is c, "one to avoid is better than none"


def test_a_rid_is_forgotten_with_the_weights_that_its_cache_is_of() -> None:
    servers, mirror = pool_of(["a", "b"]), ServerPool()
    mirror.mirror(servers.view())
    for one in (servers, mirror):
        a = one.servers[0]
        assert [one.pick("r", 10), one.pick("r", 10)] == [a, a], "the other one has nothing to do"
    servers.advance(servers.servers, 1)
    mirror.mirror(servers.view())
    for one in (servers, mirror):
        assert one.pick("r", 1) is one.servers[1]


def test_servers_are_not_slow_because_all_have_become_faster() -> None:
    """When the load falls, the first fast completions of many servers made each of them slower than usual, and all new
    requests went to the few that had replied."""
    servers = pool_of([f"s{number}" for number in range(8)])
    for number in range(8 * 30):
        assert servers.pick(f"r{number}", 10) is not None
    for speed in [10] * 20 + [100] * 5:
        for server in servers.servers:
            servers.measure(server, speed, 1.0)
    assert not any(servers.is_slow(server) for server in servers.servers)


def test_a_rid_leaves_a_server_that_is_very_slow() -> None:
    """Its cached prefix saves less than the server's slowness costs."""
    servers = pool_of(["a", "b"])
    a, b = servers.servers
    assert servers.pick("r", 10) is a
    for _ in range(100):
        servers.measure(a, 60, 1.0)
        servers.measure(b, 100, 1.0)
    assert servers.pick("r", 10) is a, "slower, but not by half"
    for _ in range(100):
        servers.measure(a, 30, 1.0)
        servers.measure(b, 100, 1.0)
    assert [servers.pick("r", 10) for _ in range(3)] == [b] * 3, "also with more to do"


def test_only_servers_with_the_newest_weights_are_picked() -> None:
    servers = pool_of(["a", "b"])
    a, b = servers.servers
    assert servers.pick("r", 1) is a
    servers.advance([b], 3)
    assert [servers.pick(rid, 1) for rid in ("r", "r", "s", "t")] == [b] * 4, "also a rid that was with another"
    servers.add("old")
    servers.add("new")
    servers.advance([b, servers.servers[-1]], 3)
    assert servers.pick("u", 1) is servers.servers[-1], "the new one"
    servers.remove("new")
    servers.suspend(b)
    assert servers.pick("v", 1) is None, "requests wait for it"
    assert [one.address for one in servers.joining] == ["a", "old"]
    servers.advance([a], 4)
    assert servers.pick("x", 1) is a


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=60))
def test_load_stays_balanced(requests: list[tuple[int, int]]) -> None:
    servers = pool_of(["a", "b", "c"])
    for number, (_, tokens) in enumerate(requests):
        servers.pick(str(number), tokens)
    loads = [server.outstanding_tokens for server in servers.servers]
    assert max(loads) - min(loads) <= max((tokens for _, tokens in requests), default=0)


# Servers of different speeds


def test_slots_are_known_only_while_servers_tell_them() -> None:
    pool = pool_of([])
    assert pool.num_slots is None  # and not 0, which any number of requests would fill
    pool.add("a:1", ServerFacts(slots=3))
    pool.advance(pool.servers, 0)
    assert pool.num_slots == 3
    pool.add("b:2", ServerFacts())
    pool.advance(pool.servers, 0)
    assert pool.num_slots is None
    pool.remove("b:2")
    assert pool.num_slots == 3


def test_a_server_gets_at_most_as_many_requests_as_it_has_slots() -> None:
    pool = pool_of([])
    for address, slots in (("a", 2), ("b", 1)):
        pool.add(address, ServerFacts(slots=slots))
    pool.advance(pool.servers, 0)
    a, b = pool.servers
    assert [pool.pick("r", 1), pool.pick("r", 1), pool.pick("r", 1), pool.pick("r", 1)] == [a, a, b, None]
    pool.release(a, 1)
    assert pool.pick("new", 1, avoid={a}) is None, "it has failed there, and b may have a slot soon"
    assert pool.pick("new", 1, avoid={a, b}) is a
    pool.release(b, 1)
    assert pool.pick("new", 1, freed=a) is None and pool.pick("new", 1, freed=b) is b
    pool.add("c")
    pool.advance(pool.servers, 1)
    assert [pool.pick("r", 1).address for _ in range(20)] == ["c"] * 20, "it does not tell its slots"  # type: ignore[union-attr]


def test_of_many_servers_the_best_of_a_few_is_nearly_the_best() -> None:
    pool = pool_of([f"s{number}" for number in range(500)])
    for number in range(10_000):
        pool.pick(str(number), 1)
    assert (
        max(server.num_in_flight for server in pool.servers) <= 22
        and sum(one.num_in_flight for one in pool.servers) == 10_000
    )


def simulate(coroutine: Coroutine[Any, Any, None]) -> None:
    with contextlib.closing(loop := VirtualLoop()):
        loop.run_until_complete(coroutine)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))


@dataclass
class Nature:
    """How fast a simulated server is, and how much more slowly it answers with every further request."""

    token_s: float = 0.01
    crowding: float = 0.05
    in_flight: int = 0
    num_tokens: int = 0


class Fleet:
    """Simulated servers, and clients that keep them busy."""

    def __init__(self, *natures: Nature, num_clients: int) -> None:
        names = [f"s{index}" for index in range(len(natures))]
        self.servers = pool_of(names, clock=asyncio.get_running_loop().time)
        self.natures = dict(zip(self.servers.servers, natures))
        self.rng = random.Random(1)
        self.clients = [asyncio.create_task(self.client()) for _ in range(num_clients)]

    async def client(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            num_tokens = self.rng.randint(4, 400)
            server = self.servers.pick(str(self.rng.random()), 420)
            assert server is not None
            nature, began = self.natures[server], clock()
            nature.in_flight += 1
            for _ in range(4):
                crowd = 1 + nature.crowding * (nature.in_flight - 1)
                await asyncio.sleep(num_tokens / 4 * nature.token_s * crowd * self.rng.uniform(0.7, 1.5))
            nature.in_flight -= 1
            nature.num_tokens += num_tokens
            self.servers.measure(server, num_tokens, clock() - began)
            self.servers.release(server, 420)

    async def shares(self, seconds: float) -> list[float]:
        """Return each server's share of what is sampled from now on."""
        for nature in self.natures.values():
            nature.num_tokens = 0
        await asyncio.sleep(seconds)
        total = sum(nature.num_tokens for nature in self.natures.values())
        return [nature.num_tokens / total for nature in self.natures.values()]


def test_servers_get_requests_in_proportion_to_their_speed() -> None:
    """They are as good as full, so what they sample together is fixed: 4, 2 and 1 parts of 7."""

    async def run() -> None:
        fleet = Fleet(*(Nature(token_s, crowding=1.0) for token_s in (0.01, 0.02, 0.04)), num_clients=48)
        await fleet.shares(300)
        assert await fleet.shares(1500) == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.04)

    simulate(run())


@pytest.mark.parametrize(("crowding", "num_servers", "num_clients"), [(0.05, 2, 16), (0.0, 4, 8), (1.0, 4, 8)])
def test_a_server_that_slows_down_gets_less_and_recovers_by_itself(
    crowding: float, num_servers: int, num_clients: int
) -> None:
    async def run() -> None:
        fleet = Fleet(*(Nature(crowding=crowding) for _ in range(num_servers)), num_clients=num_clients)
        equal = pytest.approx([1 / num_servers] * num_servers, abs=0.05)
        await fleet.shares(100)
        assert await fleet.shares(300) == equal
        first = fleet.natures[fleet.servers.servers[0]]
        first.token_s *= 20
        await fleet.shares(600)
        slow, *others = await fleet.shares(600)
        assert 0 < slow < 0.1 / num_servers + 0.02 * crowding
        assert others == pytest.approx([(1 - slow) / (num_servers - 1)] * (num_servers - 1), abs=0.05)
        first.token_s /= 20
        await fleet.shares(600)
        assert await fleet.shares(600) == equal

    simulate(run())


def test_a_server_that_all_but_stops_is_asked_for_one_completion_at_a_time() -> None:
    """Until that one ends nothing new is known of its speed, and time alone does not make it faster."""

    async def run() -> None:
        fleet = Fleet(Nature(), Nature(), num_clients=16)
        await fleet.shares(100)
        slow, fast = fleet.natures.values()
        slow.token_s *= 20
        await fleet.shares(600)
        slow.token_s *= 100
        await fleet.shares(3000)
        held = [slow.in_flight]
        for _ in range(10):
            await fleet.shares(100)
            held.append(slow.in_flight)
        assert max(held) <= 2 and fast.in_flight >= 14

    simulate(run())


def test_a_server_that_joins_gets_its_share_at_once() -> None:
    """Nothing is known of its speed yet."""

    async def run() -> None:
        fleet = Fleet(Nature(crowding=0.5), Nature(crowding=0.5), num_clients=64)
        joining = fleet.servers.servers[1]
        fleet.servers.suspend(joining)
        assert await fleet.shares(200) == [1, 0]
        fleet.servers.restore(joining)
        await fleet.shares(60)
        assert await fleet.shares(300) == pytest.approx([0.5, 0.5], abs=0.05)

    simulate(run())


def test_short_completions_say_nothing_about_speed() -> None:
    servers = pool_of(["a"])
    (server,) = servers.servers
    servers.measure(server, 7, 1.0)
    assert server.tokens_per_s is None
    servers.measure(server, 80, 2.0)
    servers.measure(server, 80, 1.0)
    assert server.tokens_per_s == pytest.approx(0.8 * 40 + 0.2 * 80)


def test_a_pause_doubles_up_to_its_limit_whatever_the_number_of_failures() -> None:
    assert [backoff_s(number, 0.5, 60.0) for number in (1, 2, 3, 8, 9, 5000)] == [0.5, 1.0, 2.0, 60.0, 60.0, 60.0]


def test_a_pool_mirrors_another_but_keeps_what_it_has_found_out() -> None:
    ours, theirs = ServerPool(), ServerPool()
    for address in ("a:1", "b:1"):
        theirs.add(address, ServerFacts(num_gpus=2))
    theirs.advance(theirs.servers, 3)
    ours.mirror(theirs.view())
    a, b = ours.servers
    assert [(one.address, one.version, one.facts.num_gpus) for one in (a, b)] == [("a:1", 3, 2), ("b:1", 3, 2)]
    ours.mark_weights_lost(a, 3)
    ours.suspend(b)
    ours.mirror(theirs.view())  # which knows of neither
    assert ours.serving == [] and ours.servers == [a, b]
    theirs.remove("b:1")
    theirs.advance(theirs.servers, 4)
    ours.mirror(theirs.view())
    assert ours.serving == [a] and (ours.version, a.version) == (4, 4)

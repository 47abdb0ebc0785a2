"""Servers that hang: real processes, stopped by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import testing_forks
from aiohttp import web
from testing_raw import REPLIES, json_reply
from testing_server import ScriptedServer, serve

from arealite.api.errors import ServerError, UnreachableError
from arealite.inference.health import Health
from arealite.inference.http import Json, ServerConnection, deadline_in, open_session
from arealite.inference.pool import Server, ServerPool

QUIET_S, HEALTH_S = 0.3, 1.5
SECRET = "s3cret"


class SlowServer(ScriptedServer):
    """Answers a request after the seconds that it asks for."""

    health_delay_s = 0.0

    async def _generate(self, request: web.Request) -> web.Response:
        await asyncio.sleep((await request.json())["seconds"])
        return web.json_response({"done": True})

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_delay_s)
        return await super()._health(request)


def serve_until_killed(test: Connection) -> None:
    with serve(SlowServer()) as server:
        test.send(server.address)
        time.sleep(600)


@contextlib.contextmanager
def started() -> Iterator[tuple[str, int]]:
    """Run a server process; yield its address and pid."""
    with testing_forks.connected(serve_until_killed) as fork:
        pid = fork.process.pid
        assert pid is not None
        yield fork.receive(), pid


@contextlib.contextmanager
def two_servers(health_delay_s: float = 0.0) -> Iterator[tuple[str, str]]:
    """Serve two in threads, of which the first may be slow to tell its health; yield their addresses."""
    with serve(SlowServer()) as first, serve(SlowServer()) as second:
        first.health_delay_s = health_delay_s
        yield first.address, second.address


@contextlib.asynccontextmanager
async def watching(*addresses: str) -> AsyncIterator[tuple[Health, list[Server], asyncio.Event]]:
    servers, may_generate = ServerPool(), asyncio.Event()
    may_generate.set()
    for address in addresses:
        servers.add(address)
    servers.advance(servers.servers, 0)
    async with open_session(SECRET) as session:
        health = Health(session, servers, may_generate)
        health.quiet_s, health.health_s = QUIET_S, HEALTH_S
        yield health, servers.servers, may_generate
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def post(health: Health, server: Server, payload: Json, *, timeout_s: float = 60) -> Json:
    async with health.in_flight(server):
        connection = ServerConnection(health.session, server.address, deadline_in(timeout_s))
        return await connection.request("POST", "/generate", payload)


async def test_requests_of_a_stopped_server_are_given_up_and_it_is_readmitted() -> None:
    with started() as (address, pid), serve(SlowServer()) as other:
        async with watching(address, other.address) as (health, (server, second), _):
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(UnreachableError, match=f"{address} must reach a live server"):
                await post(health, server, {"seconds": 600}, timeout_s=600)
            assert (server.state, second.state) == ("removed", "serving")
            os.kill(pid, signal.SIGCONT)
            await until(lambda: server.state == "serving")


async def test_requests_wait_for_a_stopped_server_if_there_is_no_other() -> None:
    with started() as (address, pid):
        async with watching(address) as (health, (server,), _):
            os.kill(pid, signal.SIGSTOP)
            request = asyncio.create_task(post(health, server, {"seconds": 0}))
            await until(lambda: server.state == "removed")
            await asyncio.sleep(1)
            assert not request.done()
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(120):
                assert await request == {"done": True}


async def test_a_call_of_an_update_ends_when_its_server_is_dead_and_not_before() -> None:
    async def call(health: Health, server: Server, seconds: float) -> Json:
        async with health.in_flight(server, is_update=True):
            connection = ServerConnection(health.session, server.address, deadline_in(600))
            return await connection.request("POST", "/generate", {"seconds": seconds})

    with started() as (address, pid):
        async with watching(address) as (health, (server,), may_generate):
            may_generate.clear()
            assert await call(health, server, 1.5) == {"done": True} and server.state == "serving"
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(UnreachableError, match=f"{address} must reach a live server"):
                await call(health, server, 600)
            assert server.state == "removed"
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", ["ssh", "bad chunk", "redirect"])
async def test_a_server_that_spoke_no_http_is_readmitted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """No reply kills the task that waits for it, and none puts the run's secret into a log."""
    gc.collect()  # what earlier tests left is no matter of this one
    caplog.clear()
    with serve(ScriptedServer(raw={"/health": REPLIES[kind]})) as one:
        async with watching(one.address) as (health, (server,), _):
            health.suspect(server)
            await asyncio.sleep(0.5)
            assert server.state == "removed"
            one.raw.clear()
            await until(lambda: server.state == "serving")
    gc.collect()  # asyncio reports a task that failed when nothing refers to it any more
    assert SECRET not in caplog.text and "failed" not in caplog.text and "exception" not in caplog.text


@pytest.mark.parametrize("body", [b'"ok"', b"{", b'{"success": false}', b""])
async def test_any_status_of_success_is_health(body: bytes) -> None:
    """Gateways answer what they like."""
    with serve(ScriptedServer(raw={"/": json_reply(body)})) as one:
        async with watching(one.address) as (health, (server,), _):
            assert await health.dead_among([server]) == []


async def test_without_a_file_to_ask_no_server_is_judged() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve(ScriptedServer()) as one:
        async with watching(one.address) as (health, (server,), _):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                dead = await health.dead_among([server])
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert dead == [] and server.state == "serving"


async def test_a_long_request_on_a_healthy_server_is_left_alone() -> None:
    with two_servers() as addresses:
        async with watching(*addresses) as (health, (server, _), _):
            assert await post(health, server, {"seconds": 1.5}) == {"done": True}
            assert server.state == "serving"


async def test_answers_are_signs_of_life_even_if_health_is_slow() -> None:
    with two_servers(health_delay_s=15) as addresses:
        async with watching(*addresses) as (health, (server, _), _):
            long = asyncio.create_task(post(health, server, {"seconds": 2.5}))
            while not long.done():
                await post(health, server, {"seconds": 0.1})
            assert await long == {"done": True} and server.state == "serving"


async def test_nobody_is_judged_during_a_publication() -> None:
    with two_servers(health_delay_s=15) as addresses:
        async with watching(*addresses) as (health, (server, _), may_generate):
            may_generate.clear()
            assert await post(health, server, {"seconds": 2.5}) == {"done": True}
            assert server.state == "serving"


async def test_a_sick_server_that_answers_health_gets_requests_ever_more_rarely() -> None:
    async def seconds_without_requests(server: Server) -> float:
        began = time.monotonic()
        health.suspect(server)
        await until(lambda: server.state == "serving")
        return time.monotonic() - began

    with two_servers() as addresses:
        async with watching(*addresses) as (health, (server, _), _):
            pauses = [await seconds_without_requests(server) for _ in range(4)]
            assert all(pause >= 0.1 * 2**index for index, pause in enumerate(pauses))
            assert server.num_failures == 4 and await post(health, server, {"seconds": 0}) == {"done": True}
            assert server.num_failures == 0, "it has answered well in between"


async def test_a_request_has_its_own_deadline() -> None:
    with serve(SlowServer()) as one:
        async with watching(one.address) as (health, (server,), _):
            with pytest.raises(ServerError, match=r"must answer within 0\.(2|1\d+) s"):
                await post(health, server, {"seconds": 9}, timeout_s=0.2)

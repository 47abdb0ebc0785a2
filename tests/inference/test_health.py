"""Servers that hang: real processes, stopped by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from testing_raw import REPLIES, json_reply
from testing_server import ScriptedServer, serve

from arealite.api.errors import ServerError, UnreachableError
from arealite.inference.health import Health
from arealite.inference.http import Json, ServerConnection, deadline_in, open_session
from arealite.inference.pool import Server, ServerPool

QUIET_S, HEALTH_S = 0.3, 1.5
SECRET = "s3cret"

SERVER = """
import asyncio, sys
from aiohttp import web

async def generate(request):
    await asyncio.sleep((await request.json())["seconds"])
    return web.json_response({"done": True})

async def health(request):
    await asyncio.sleep(float(sys.argv[1]))
    return web.json_response({})

async def main():
    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def started(tmp_path: Path, *, health_delay_s: float = 0.0) -> Iterator[tuple[str, int]]:
    """Run a server process; yield its address and pid."""
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), str(health_delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}", process.pid
    finally:
        process.kill()
        process.communicate()


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


async def post(health: Health, server: Server, payload: Json, *, timeout_s: float = 60) -> Json:
    async with health.in_flight(server):
        connection = ServerConnection(health.session, server.address, deadline_in(timeout_s))
        return await connection.request("POST", "/generate", payload)


async def test_requests_of_a_stopped_server_are_given_up_and_it_is_readmitted(tmp_path: Path) -> None:
    with started(tmp_path) as (address, pid), started(tmp_path) as (other, _):
        async with watching(address, other) as (health, (server, second), _):
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(UnreachableError, match=f"{address} must reach a live server"):
                await post(health, server, {"seconds": 600}, timeout_s=600)
            assert (server.state, second.state) == ("removed", "serving")
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(120):
                while server.state == "removed":
                    await asyncio.sleep(0.02)


async def test_requests_wait_for_a_stopped_server_if_there_is_no_other(tmp_path: Path) -> None:
    with started(tmp_path) as (address, pid):
        async with watching(address) as (health, (server,), _):
            os.kill(pid, signal.SIGSTOP)
            request = asyncio.create_task(post(health, server, {"seconds": 0}))
            async with asyncio.timeout(120):
                while server.state == "serving":
                    await asyncio.sleep(0.02)
            await asyncio.sleep(1)
            assert not request.done()
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(120):
                assert await request == {"done": True}


@pytest.mark.parametrize("kind", ["ssh", "long header", "bad chunk", "redirect"])
async def test_a_server_that_spoke_no_http_is_readmitted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """No reply kills the task that waits for it, and none puts the run's secret into a log."""
    gc.collect()  # what earlier tests left is no matter of this one
    caplog.clear()
    with serve(ScriptedServer(raw={"/health": REPLIES[kind]})) as one:
        async with watching(one.address) as (health, (server,), _):
            assert await health.dead_among([server]) == [server]
            await asyncio.sleep(0.5)
            assert server.state == "removed"
            one.raw.clear()
            async with asyncio.timeout(120):
                while server.state == "removed":
                    await asyncio.sleep(0.02)
    gc.collect()  # asyncio reports a task that failed when nothing refers to it any more
    assert SECRET not in caplog.text and "failed" not in caplog.text and "exception" not in caplog.text


@pytest.mark.parametrize("body", [b'"ok"', b"true", b"[]", b"{", b'{"success": false}', b""])
async def test_any_status_of_success_is_health(body: bytes) -> None:
    """Gateways answer what they like."""
    with serve(ScriptedServer(raw={"/health": json_reply(body)})) as one:
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


async def test_a_long_request_on_a_healthy_server_is_left_alone(tmp_path: Path) -> None:
    with started(tmp_path) as (address, _), started(tmp_path) as (other, _):
        async with watching(address, other) as (health, (server, _), _):
            assert await post(health, server, {"seconds": 3.5}) == {"done": True}
            assert server.state == "serving"


async def test_answers_are_signs_of_life_even_if_health_is_slow(tmp_path: Path) -> None:
    with started(tmp_path, health_delay_s=15) as (address, _), started(tmp_path) as (other, _):
        async with watching(address, other) as (health, (server, _), _):
            long = asyncio.create_task(post(health, server, {"seconds": 3.5}))
            while not long.done():
                await post(health, server, {"seconds": 0.1})
            assert await long == {"done": True} and server.state == "serving"


async def test_nobody_is_judged_during_a_publication(tmp_path: Path) -> None:
    with started(tmp_path, health_delay_s=15) as (address, _), started(tmp_path) as (other, _):
        async with watching(address, other) as (health, (server, _), may_generate):
            may_generate.clear()
            assert await post(health, server, {"seconds": 3.5}) == {"done": True}
            assert server.state == "serving"


async def test_a_sick_server_that_answers_health_gets_requests_ever_more_rarely(tmp_path: Path) -> None:
    async def seconds_without_requests(server: Server) -> float:
        began = time.monotonic()
        health.suspect(server)
        async with asyncio.timeout(120):
            while server.state == "removed":
                await asyncio.sleep(0.01)
        return time.monotonic() - began

    with started(tmp_path) as (address, _), started(tmp_path) as (other, _):
        async with watching(address, other) as (health, (server, _), _):
            pauses = [await seconds_without_requests(server) for _ in range(5)]
            assert all(pause >= 0.1 * 2**index for index, pause in enumerate(pauses))
            assert await post(health, server, {"seconds": 0}) == {"done": True}
            assert await seconds_without_requests(server) < 3.2, "it has answered well in between"


async def test_a_request_has_its_own_deadline(tmp_path: Path) -> None:
    with started(tmp_path) as (address, _):
        async with watching(address) as (health, (server,), _):
            with pytest.raises(ServerError, match=r"must answer within 0\.(2|1\d+) s"):
                await post(health, server, {"seconds": 9}, timeout_s=0.2)

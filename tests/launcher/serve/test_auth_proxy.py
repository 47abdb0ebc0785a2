"""The proxy before a server that knows no secret, over real connections."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from arealite.launcher.serve.auth_proxy import AuthProxy
from testing_ports import held_port

from arealite.utils.network import LOOPBACK
from arealite.utils.secret import authorization

SECRET = "s3cret"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def proxied(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Serve `handler` behind a proxy; yields a session that shows the secret, and the proxy's URL."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    upstream, port = runner.addresses[0], held_port()
    proxy = AuthProxy(f"{LOOPBACK}:{upstream[1]}", secret=SECRET)
    await proxy.start(LOOPBACK, port)
    try:
        async with aiohttp.ClientSession(headers=authorization(SECRET), auto_decompress=False) as session:
            yield session, f"http://{LOOPBACK}:{port}"
    finally:
        await proxy.close()
        await runner.cleanup()


def run(handler: Handler, ask: Callable[[aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), proxied(handler) as (session, url):
            await ask(session, url)

    asyncio.run(main())


async def echo(request: web.Request) -> web.Response:
    headers = {"X-Seen": repr(sorted(name.lower() for name in request.headers)), "X-Path": request.raw_path}
    body = await request.read()
    return web.Response(status=418, reason="Short and stout", body=body, headers=headers | {"X-Method": request.method})


def test_only_the_secret_gets_through() -> None:
    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        for headers in ({"Authorization": ""}, authorization("other")):
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                async with session.request(method, f"{url}/generate", headers=headers) as answer:
                    assert answer.status == 401, method
                    assert "must show the secret of the run" in (await answer.json())["error"]["message"]
        for method, path, expected in [("GET", "/health", 418), ("POST", "/health", 401), ("GET", "/health/x", 401)]:
            async with session.request(method, url + path, headers={"Authorization": ""}) as answer:
                assert answer.status == expected

    run(echo, ask)


def test_requests_and_answers_pass_unchanged() -> None:
    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        path = "/a%2Fb/c?x=1%20&y=%2B"
        headers = {"X-Mine": "1", "Content-Type": "application/json", "Connection": "keep-alive"}
        async with session.patch(url + path.replace("%", "%25"), data=b"{}", headers=headers) as answer:
            assert answer.headers["X-Path"] == path.replace("%", "%25")
        async with session.patch(f"{url}/plain?x=1&y=2", data=b"{}", headers=headers) as answer:
            assert (answer.status, answer.reason) == (418, "Short and stout")
            assert answer.headers["X-Path"] == "/plain?x=1&y=2" and answer.headers["X-Method"] == "PATCH"
            assert "'x-mine'" in answer.headers["X-Seen"] and "'content-length'" in answer.headers["X-Seen"]
            assert "authorization" not in answer.headers["X-Seen"], "the server never sees the secret"
            assert await answer.read() == b"{}"

    run(echo, ask)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_64_mib_pass_both_ways(is_chunked: bool) -> None:
    body = os.urandom(2**20) * 64

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10**6):
            yield body[start : start + 10**6]

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        async with session.post(f"{url}/echo", data=chunks() if is_chunked else body) as answer:
            digest = hashlib.sha256()
            async for chunk in answer.content.iter_any():
                digest.update(chunk)
            assert digest.digest() == hashlib.sha256(body).digest()

    run(echo, ask)


def test_an_answer_comes_piece_by_piece() -> None:
    told = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await told.wait()
        await response.write(b"second")
        return response

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        async with session.get(url) as answer:
            assert await answer.content.readany() == b"first"
            told.set()
            assert await answer.content.readany() == b"second"

    run(stream, ask)


def test_half_an_answer_does_not_look_whole() -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(url) as answer:
                await answer.read()

    run(hang_up, ask)


def test_a_client_that_leaves_takes_its_request_along() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async def ask(session: aiohttp.ClientSession, url: str) -> None:
        asking = asyncio.create_task(session.post(f"{url}/generate").__aenter__())
        await started.wait()
        asking.cancel()
        await cancelled.wait()

    run(hold, ask)


def test_without_its_server_it_says_so() -> None:
    async def main() -> None:
        proxy, port = AuthProxy(f"{LOOPBACK}:{held_port()}", secret=SECRET), held_port()
        await proxy.start(LOOPBACK, port)
        async with aiohttp.ClientSession() as session, session.get(f"http://{LOOPBACK}:{port}/health") as answer:
            assert answer.status == 502
            assert "the server behind this address must answer: got" in (await answer.json())["error"]["message"]
        await proxy.close()

    asyncio.run(main())

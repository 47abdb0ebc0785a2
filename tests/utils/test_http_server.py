"""What strangers may cost a server: connections that bring no request with the secret."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from arealite.utils import http_server
from arealite.utils.http_server import HttpServer
from arealite.utils.network import LOOPBACK
from arealite.utils.processes import raise_file_limit

SECRET = "s3cret"
HALF = b"GET /work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3c"


@contextlib.asynccontextmanager
async def listening(secret: str | None = SECRET) -> AsyncIterator[int]:
    async def work(_: web.Request) -> web.Response:
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/work", work)
    server = HttpServer(app, secret)
    yield await server.start(LOOPBACK)
    await server.close()


async def send(port: int, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(text)
    await writer.drain()
    return reader, writer


async def request(port: int, secret: str = SECRET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    head = f"GET /work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n"
    reader, writer = await send(port, head.encode())
    assert b"200 OK" in await reader.readuntil(b"done")
    return reader, writer


@pytest.mark.parametrize(
    "text",
    [
        b"GET /work HTTP/1.1\r\nHost: x\r\nAuthorization\xd7: Bearer s3cret\r\n\r\n",
        b"GET /work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\rx\r\n\r\n",
        b"\x16\x03\x01 Bearer s3cret\r\n\r\n",
    ],
)
async def test_a_request_that_is_no_http_is_refused_and_not_logged(
    text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as port, asyncio.timeout(120):
        reader, writer = await send(port, text)
        assert b"400 Bad Request" in await reader.readline()
        writer.close()
    assert caplog.text == ""


@pytest.mark.parametrize("text", [b"", HALF, b"GET /work HTTP/1.1\r\n\r\n"])
async def test_a_connection_that_shows_no_secret_ends(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.3)
    async with listening() as port, asyncio.timeout(120):
        reader, writer = await send(port, text)
        await reader.read()  # to its end
        writer.close()


async def test_a_connection_that_was_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 1.0)
    for secret in (SECRET, None):
        async with listening(secret) as port, asyncio.timeout(120):
            reader, writer = await request(port)
            await asyncio.sleep(2.0)
            writer.write(b"GET /work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"done")
            writer.close()


async def test_the_oldest_unused_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (20, 20))
    async with listening() as port, asyncio.timeout(120):
        used = await request(port)
        held = [await send(port, HALF) for _ in range(12)]
        await held[0][0].read()
        await held[1][0].read()
        assert not held[2][0].at_eof() and not used[0].at_eof()
        for _, writer in [used, *held]:
            writer.close()


def test_the_soft_limit_of_files_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""A port of loopback that answers each request with any bytes, which need not be HTTP, or passes it on to a server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from arealite.utils.network import LOOPBACK

_START_S = 60.0


@dataclass(frozen=True)
class Request:
    """What was asked, as it came."""

    path: str
    head: bytes
    body: bytes


def reply(body: bytes = b"{}", *headers: str, status: str = "200 OK", type: str = "application/json") -> bytes:
    """Return an answer that is right as HTTP unless the headers are not."""
    head = [f"HTTP/1.1 {status}", f"Content-Type: {type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def with_body(answer: bytes, body: bytes) -> bytes:
    """Replace the body of an answer."""
    head = re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % len(body), answer.partition(b"\r\n\r\n")[0])
    return head + b"\r\n\r\n" + body


async def pass_on(server: str, request: Request) -> bytes:
    """Return what a server answers, head and body."""
    host, _, port = server.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request.head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + request.body)
        return await reader.read()
    finally:
        writer.transport.abort()


@contextlib.contextmanager
def answering(answer: Callable[[Request], AsyncIterator[bytes]] | bytes, port: int = 0) -> Iterator[str]:
    """Answer in a thread until the block ends, and hang up after each answer; yield the address. `port` 0 is any."""

    async def write(request: Request, writer: asyncio.StreamWriter) -> None:
        if isinstance(answer, bytes):
            writer.write(answer)
        else:
            async for piece in answer(request):
                writer.write(piece)
                await writer.drain()
        await writer.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            request = Request(head.split(b" ")[1].decode(errors="replace"), head, body)
            # A client that hangs up ends what was begun for it.
            tasks = {asyncio.create_task(write(request, writer)), asyncio.create_task(reader.read(1))}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()

    async def stop() -> None:
        server.close()
        await asyncio.sleep(0.01)  # a connection that was accepted just now has no task yet
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    run = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(_START_S)  # noqa: E731
    server = run(asyncio.start_server(handle, LOOPBACK, port, limit=2**20))
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        run(stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

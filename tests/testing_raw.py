"""A program that answers every request with the same bytes, which need not be HTTP: whatever is at a server's port."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from arealite.utils.network import LOOPBACK

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_MOVED = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "

REPLIES = {
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "redis": b"-ERR unknown command 'GET'\r\n",
    "zeros": bytes(64),
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "no status": b"HTTP/1.1 99 X\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "long header": _OK + b"X: " + b"a" * 9000 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "bad chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "cut chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "cut body": _OK + b"Content-Length: 20\r\n\r\n{",
    "bad gzip": _OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "bad redirect": _MOVED + b"http://x:99999/\r\n\r\n",
    "redirect": _MOVED + b"/elsewhere\r\n\r\n",
    "other protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
}
"""None of them is an answer of an inference server."""


def json_reply(body: bytes) -> bytes:
    """Return a complete answer."""
    return _OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextlib.contextmanager
def answering(reply: bytes, port: int = 0) -> Iterator[str]:
    """Run such a program on loopback until the block ends, and yield its address; `port` 0 is any."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        writer.close()

    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(answer, LOOPBACK, port), loop).result(60)
    try:
        yield f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()

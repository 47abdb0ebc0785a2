"""What clients of servers make of answers that are not HTTP."""

from __future__ import annotations

import asyncio

import pytest

from arealite.api.errors import UnreachableError
from arealite.inference.http import ServerConnection, deadline_in, open_session
from arealite.utils.network import LOOPBACK


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_another_program_at_the_address_is_no_server(answer: bytes) -> None:
    """A server that died may have left its port to any program."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, LOOPBACK, 0) as program, open_session("s3cret") as session:
        address = f"{LOOPBACK}:{program.sockets[0].getsockname()[1]}"
        with pytest.raises(UnreachableError, match=rf"GET http://{address}/health must reach a server") as caught:
            await ServerConnection(session, address, deadline_in(30)).request("GET", "/health")
    assert "s3cret" not in repr(caught.value)

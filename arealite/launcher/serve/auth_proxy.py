"""Stands before a server that can't check our secret: answers those who show it with what the server answers.

The server listens on loopback alone. Bodies are passed on in both directions as they come, of any length, and a client
that goes away takes its request with it. GET /health is open, as that of our own server.
"""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp
from aiohttp import web
from yarl import URL

from arealite.utils.secret import is_authorized, refusal

_OF_ONE_CONNECTION = {
    *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "date", "server"),
    *("authorization", "proxy-authenticate", "proxy-authorization"),
}


class AuthProxy:
    """Answers at `host:port` for the server at `upstream` until it is closed; must be created in its event loop."""

    def __init__(self, upstream: str, *, secret: str) -> None:
        self._upstream = f"http://{upstream}"
        self._secret = secret
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # the server may close what is kept open
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def close(self) -> None:
        """Stop listening, once the answers under way are out."""
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        is_open = (request.method, request.path) == ("GET", "/health")
        if not is_open and not is_authorized(request.headers.get("Authorization"), self._secret):
            return _error(401, refusal(request.method, request.path))
        passed_on: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(self._upstream + request.raw_path, encoded=True),
                headers=_lasting(request.headers.items()),
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            ) as answer:
                headers = _lasting(answer.headers.items())
                passed_on = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
                await passed_on.prepare(request)
                async for chunk in answer.content.iter_any():
                    await passed_on.write(chunk)
                await passed_on.write_eof()
                return passed_on
        except aiohttp.ClientError as error:
            if passed_on is None:
                return _error(502, f"the server behind this address must answer: got {type(error).__name__}: {error}")
            if request.transport is not None:  # half an answer must not look like a whole one
                request.transport.abort()
            return passed_on


def _lasting(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers that are not about one connection, nor for us."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"success": False, "message": message, "error": {"message": message}}, status=status)

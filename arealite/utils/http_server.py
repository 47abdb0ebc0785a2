"""An HTTP server whose file descriptors can't be exhausted by clients without the secret.

A connection is *unused* until a request with the secret has begun on it. Invariants: an unused connection is closed
after `HEADER_S`; unused connections take at most half of the file descriptors, then the oldest is closed.
"""

import asyncio
import errno
import logging
import resource
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from arealite.utils.secret import is_authorized

logger = logging.getLogger("arealite.http")

HEADER_S = 10.0
_WARN_S = 60.0  # between two warnings
_NOT_OURS = HttpProcessingError, web.RequestPayloadError


def _is_defect(record: logging.LogRecord) -> bool:
    """Drop aiohttp's records of malformed requests: each has a traceback, with the header that holds the secret."""
    return record.exc_info is None or not isinstance(record.exc_info[1], _NOT_OURS)


logging.getLogger("aiohttp.server").addFilter(_is_defect)


class HttpServer:
    """Listens from `start` to `close`; lives in one event loop."""

    def __init__(self, app: web.Application, secret: str | None) -> None:
        app.middlewares.insert(0, self._note_use)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        self._secret = secret
        self._unused: dict[web.RequestHandler, asyncio.TimerHandle] = {}  # oldest first, with the timer that closes it
        self._warned_at = -_WARN_S
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0) -> int:
        """Listen and return the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._report)
        await self._runner.setup()
        self._server = await loop.create_server(self._accept, host, port)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, wait up to a second for requests in progress, and close all connections."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> web.RequestHandler:
        assert self._runner.server is not None
        connection = self._runner.server()
        self._unused[connection] = asyncio.get_running_loop().call_later(HEADER_S, self._hang_up, connection)
        if len(self._unused) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            self._hang_up(next(iter(self._unused)))
        return connection

    def _hang_up(self, connection: web.RequestHandler) -> None:
        self._unused.pop(connection).cancel()
        connection.force_close()

    @web.middleware
    async def _note_use(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_use = not self._secret or is_authorized(request.headers.get("Authorization"), self._secret)
        if is_use and (timer := self._unused.pop(request.protocol, None)) is not None:
            timer.cancel()
        return await handler(request)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a lack of file descriptors once a minute: asyncio would log a hundred tracebacks per second."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._warned_at >= _WARN_S:
            self._warned_at = loop.time()
            logger.warning(
                "connections must wait for a free file descriptor: got %d, all in use. Raise `ulimit -n`.",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )

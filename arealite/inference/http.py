"""JSON over HTTP to inference servers.

Invariant: every failure becomes a ServerError that names server, endpoint, status and body, by the deadline of the
call. A `StatusError` below 500 is not worth a retry, all others are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from yarl import URL

from arealite.api.errors import ServerError, UnreachableError
from arealite.utils.secret import authorization

Json = dict[str, Any]

_CONNECT_S = 10.0
_IDLE_S = 4.0
"""An idle connection is not used again after that; SGLang and vLLM close it after 5 s, and lose what is on its way."""
_SHOWN_CHARS = 500


class StatusError(ServerError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerHttp:
    """One connection pool for all servers, which sends the run's secret; belongs to one event loop."""

    def __init__(self, secret: str | None = None) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),  # the staleness account bounds requests
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", **authorization(secret)},
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        self._urls: dict[tuple[str, str], URL] = {}

    async def get(self, address: str, endpoint: str, *, timeout_s: float) -> Json:
        """GET an endpoint."""
        return await self._request("GET", address, endpoint, None, timeout_s)

    async def post(self, address: str, endpoint: str, payload: Json, *, timeout_s: float) -> Json:
        """POST a JSON object to an endpoint and return the answer; an empty or plain-text one is an empty object."""
        return await self._request("POST", address, endpoint, payload, timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _request(self, method: str, address: str, endpoint: str, payload: Json | None, timeout_s: float) -> Json:
        where = f"{method} http://{address}{endpoint}"
        # With the standard library's json a long reply would hold the event loop for 10 ms.
        body = None if payload is None else orjson.dumps(payload)
        try:
            async with (
                asyncio.timeout(timeout_s) as deadline,
                self._session.request(method, self._url(address, endpoint), data=body) as reply,
            ):
                answer = await reply.read()
        except aiohttp.ClientError as error:
            raise UnreachableError(
                f"{where} must reach a server: got {type(error).__name__}: {error}. Check that it is running."
            ) from error
        except TimeoutError as error:
            if not deadline.expired():
                raise UnreachableError(
                    f"{where} must be connected within {_CONNECT_S:g} s: it was not. Check that it is running."
                ) from error
            raise ServerError(
                f"{where} must answer within {timeout_s:g} s: got no answer. Raise the timeout or look at its log."
            ) from error
        if reply.status >= 400:
            text = answer.decode(errors="replace")[:_SHOWN_CHARS]
            raise StatusError(f"{where} must succeed: got status {reply.status}: {text}", reply.status)
        return _parsed(answer, where) if reply.content_type == "application/json" else {}

    def _url(self, address: str, endpoint: str) -> URL:
        """Return a URL, parsed once, because that takes long."""
        key = address, endpoint
        if key not in self._urls:
            self._urls[key] = URL(f"http://{address}{endpoint}")
        return self._urls[key]


def time_left(deadline: float) -> Callable[[], float]:
    """Return a function that tells the seconds until a time of the running loop, but never 0, which is no timeout."""
    loop = asyncio.get_running_loop()
    return lambda: max(0.001, deadline - loop.time())


def bad_reply(address: str, endpoint: str, rule: str, reply: object) -> ServerError:
    """Return the error of an answer that came with status 200 and breaks the protocol."""
    return ServerError(
        f"the reply of http://{address}{endpoint} must {rule}: got status 200: {str(reply)[:_SHOWN_CHARS]}. "
        "Check the version of the server."
    )


def _parsed(body: bytes, where: str) -> Json:
    if not body:
        return {}
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        text = body.decode(errors="replace")
        around = text[max(0, error.pos - _SHOWN_CHARS // 2) : error.pos + _SHOWN_CHARS // 2]
        raise ServerError(
            f"{where} must answer with JSON: got status 200 and {len(body)} bytes, {error}: ...{around}..."
        ) from error
    return parsed if isinstance(parsed, dict) else {"items": parsed}

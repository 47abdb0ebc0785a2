"""JSON over HTTP to inference servers.

Invariant: everything that goes wrong becomes a ServerError that names server, endpoint, status and body; its class
tells what a caller may do about it: `UnreachableError` and statuses from 500 may be tried again, others may not.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from arealite.api.errors import ServerError, UnreachableError

Json = dict[str, Any]

_CONNECT_S = 10.0
_SHOWN_CHARS = 500


class StatusError(ServerError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerHttp:
    """One connection pool for all servers; must be created and used in one event loop."""

    def __init__(self) -> None:
        # No limit: the staleness account bounds the number of requests.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

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
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method, f"http://{address}{endpoint}", json=payload, timeout=timeout
            ) as reply:
                body = await reply.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise UnreachableError(
                f"{where} must reach a server: got {type(error).__name__}: {error}. Check that it is running."
            ) from error
        except TimeoutError as error:
            raise ServerError(
                f"{where} must answer within {timeout_s:g} s: got no answer. Raise the timeout or look at its log."
            ) from error
        if reply.status >= 400:
            text = body.decode(errors="replace")[:_SHOWN_CHARS]
            raise StatusError(f"{where} must succeed: got status {reply.status}: {text}", reply.status)
        return _parsed(body, where, reply.status) if reply.content_type == "application/json" else {}


def bad_reply(address: str, endpoint: str, rule: str, reply: object) -> ServerError:
    """Return the error of an answer that came with status 200 and breaks the protocol."""
    return ServerError(
        f"the reply of http://{address}{endpoint} must {rule}: got status 200: {str(reply)[:_SHOWN_CHARS]}. "
        "Check the version of the server."
    )


def _parsed(body: bytes, where: str, status: int) -> Json:
    if not body:
        return {}
    try:
        parsed = json.loads(body)
    except ValueError as error:
        shown = body[:_SHOWN_CHARS].decode(errors="replace")
        raise ServerError(f"{where} must answer with JSON: got status {status}: {shown}") from error
    return parsed if isinstance(parsed, dict) else {"items": parsed}

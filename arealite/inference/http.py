"""JSON over HTTP to inference servers.

Invariant: every failure becomes a ServerError that names server, endpoint, status and body, by the deadline of the
call. A `StatusError` below 500 is not worth a retry, all others are. No error shows the secret of the run: none leads
back to one of aiohttp, whose repr has the headers of the request, and replies are read without what echoes the secret.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import resource
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson
from yarl import URL

from arealite.api.errors import ServerError, UnreachableError
from arealite.utils.secret import authorization, without_secret

Json = dict[str, Any]

_CONNECT_S = 10.0
_IDLE_S = 4.0  # an older idle connection is not used again: SGLang and vLLM close it after 5 s, with what is on its way
_SHOWN_CHARS = 500
_LONG_BYTES = 2**15  # a longer reply waits for a turn of the event loop of its own


class StatusError(ServerError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OutOfFilesError(ServerError):
    """This process can't open a connection; the server is not to blame."""


def open_session(secret: str | None = None) -> aiohttp.ClientSession:
    """Open the connections to all servers, which show the run's secret; they belong to one event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),  # the staleness account bounds requests
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Content-Type": "application/json", **authorization(secret)},
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )


@dataclass(frozen=True)
class ServerConnection:
    """Sends requests to one server, under the deadline of the operation they belong to."""

    session: aiohttp.ClientSession
    address: str
    deadline: float  # by the clock of the running loop
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the client, which long replies pass one by one

    async def request(self, method: Literal["GET", "POST"], endpoint: str, payload: Json | None = None) -> Json:
        """Return the reply, `{}` if it is no JSON; without a payload POST sends an empty object."""
        content_type, answer = await self.fetch(method, endpoint, payload)
        if not answer or content_type != "application/json":
            return {}
        if len(answer) <= _LONG_BYTES:
            return self._parsed(method, endpoint, answer)
        # Parsing takes 10 ms, and what its episode makes of it as long again: in a burst, health answers, deadlines and
        # pauses are served in between. Held for both, so that few parsed replies wait in memory.
        async with self.gate:
            await asyncio.sleep(0)
            parsed = self._parsed(method, endpoint, answer)
            await asyncio.sleep(0)
        return parsed

    def _parsed(self, method: str, endpoint: str, answer: bytes) -> Json:
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            text = answer.decode(errors="replace")
            around = text[max(0, error.pos - _SHOWN_CHARS // 2) : error.pos + _SHOWN_CHARS // 2]
            raise ServerError(
                f"{method} http://{self.address}{endpoint} must answer with JSON: got status 200 and {len(answer)} "
                f"bytes, {error}: ...{around}..."
            ) from error
        if not isinstance(parsed, dict):
            raise bad_reply(self.address, endpoint, "be a JSON object", answer.decode(errors="replace"))
        if parsed.get("success") is False:
            raise bad_reply(self.address, endpoint, "report success", parsed)
        return parsed

    async def fetch(
        self, method: Literal["GET", "POST"], endpoint: str, payload: Json | None = None
    ) -> tuple[str, bytes]:
        """Return content type and body of a reply with a status of success, whatever it holds."""
        where = f"{method} http://{self.address}{endpoint}"
        timeout_s = max(0.0, round(self.deadline - now(), 3))
        # With the standard library's json a long reply would hold the event loop for 10 ms.
        body = orjson.dumps(payload or {}) if method == "POST" else None
        try:
            async with (
                asyncio.timeout_at(self.deadline) as timeout,
                self.session.request(method, _url(self.address, endpoint), data=body, allow_redirects=False) as reply,
            ):
                answer = without_secret(await reply.read(), self.session.headers.get("Authorization"))
        except (aiohttp.ClientError, ValueError) as error:  # a ValueError is of an address that is none
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise OutOfFilesError(
                    f"{where} must get a file descriptor: got too many open files in this process, which may have "
                    f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}. Raise `ulimit -n`, or lower "
                    "rollout.max_concurrent_rollouts."
                ) from None
            raise UnreachableError(
                f"{where} must reach a server: got {type(error).__name__}: {error}. Check that it is running."
            ) from None
        except TimeoutError as error:
            if not timeout.expired():
                raise UnreachableError(
                    f"{where} must be connected within {_CONNECT_S:g} s: it was not. Check that it is running."
                ) from error
            raise ServerError(
                f"{where} must answer within {timeout_s:g} s: got no answer. Raise the timeout or look at its log."
            ) from error
        if not 200 <= reply.status < 300:
            text = answer.decode(errors="replace")[:_SHOWN_CHARS]
            raise StatusError(f"{where} must succeed: got status {reply.status}: {text}", reply.status)
        return reply.content_type, answer


def now() -> float:
    """Return the time of the running loop, by which the client lives: a simulation has a virtual one."""
    return asyncio.get_running_loop().time()


def deadline_in(seconds: float) -> float:
    """Return the time of the running loop in so many seconds."""
    return now() + seconds


def bad_reply(address: str, endpoint: str, rule: str, reply: object) -> ServerError:
    """Return the error of an answer that came with status 200 and breaks the protocol."""
    return ServerError(
        f"the reply of http://{address}{endpoint} must {rule}: got status 200: {str(reply)[:_SHOWN_CHARS]}. "
        "Check the version of the server."
    )


@functools.lru_cache(maxsize=4096)
def _url(address: str, endpoint: str) -> URL:
    """Return a URL, parsed once, because that takes long."""
    return URL(f"http://{address}{endpoint}")

"""The proxy: an HTTP server with its own event loop that speaks the protocols of OpenAI and Anthropic.

A run has a key, sent as bearer token or `x-api-key`. Bytes that clients ignore keep the connection alive during long
answers. Status: 400 if the request is wrong or the run is over a limit, 401 without the key of an open run, 409 if the
run ends during the request. No status asks the client to retry.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from arealite.agent.session import Delivery, Session
from arealite.agent.wire.base import RefusedError, Wire
from arealite.agent.wire.chat import Chat
from arealite.agent.wire.messages import Messages
from arealite.agent.wire.responses import Responses
from arealite.rollout.event_loop import EventLoopThread
from arealite.utils.http_server import HttpServer

logger = logging.getLogger("arealite.agent")

MAX_BODY_BYTES = 64 * 2**20
_CHAT, _MESSAGES = Chat(), Messages()
_WIRES = {"chat/completions": _CHAT, "responses": Responses(), "messages": _MESSAGES}
_PREFIXES = ("/v1", "/v1/v1")  # Anthropic's package adds a second /v1
_NEVER_AGAIN = {"x-should-retry": "false"}
_CLOSE_S = 5.0
_Handle = Callable[[web.Request, Wire], Awaitable[web.StreamResponse]]


class Proxy:
    """Serves open runs until closed."""

    def __init__(
        self, *, heartbeat_s: float, host: str = "127.0.0.1", port: int = 0, more: Mapping[str, _Handle] | None = None
    ) -> None:
        """`more` handles POST requests at further paths."""
        self._heartbeat_s = heartbeat_s
        self._sessions: dict[str, tuple[Session, bool]] = {}  # session by key, and whether its samples are trained on
        self._warned: set[str] = set()  # names of ignored parameters
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for prefix in _PREFIXES:
            for path, wire in _WIRES.items():
                app.router.add_post(f"{prefix}/{path}", self._endpoint(wire, self._serve))
            app.router.add_post(f"{prefix}/messages/count_tokens", self._endpoint(_MESSAGES, self._count_tokens))
            app.router.add_get(f"{prefix}/models", self._endpoint(_CHAT, self._models))
        for path, handle in (more or {}).items():
            app.router.add_post(path, self._endpoint(_CHAT, handle))
        self._server = HttpServer(app, None)  # each run has a key
        self.loop = EventLoopThread("arealite-proxy", what="loop of the proxy")
        self.loop.closers.append(self._server.close)
        self.port = self.loop.run(self._server.start(host, port))
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.address = f"http://{f'[{local}]' if ':' in local else local}:{self.port}"
        """URL for processes of this node."""

    async def open(self, session: Session) -> None:
        """Start serving a run; called in the event loop of its episode."""
        await asyncio.wrap_future(self.loop.submit(self._open(session)))

    async def end(self, session: Session) -> None:
        """Stop serving a run; answers that were not delivered are not part of it."""
        await asyncio.wrap_future(self.loop.submit(self._end(session)))

    def close(self) -> None:
        self.loop.close(_CLOSE_S)

    async def _open(self, session: Session) -> None:
        self._sessions[session.key] = session, True
        self._sessions[session.untrained_key] = session, False

    async def _end(self, session: Session) -> None:
        session.close()
        for key in (session.key, session.untrained_key):
            self._sessions.pop(key, None)
        ignored = {name.removeprefix("ignored/") for name in session.counts if name.startswith("ignored/")}
        if names := ", ".join(sorted(ignored - self._warned)):
            logger.warning("agents ask for %s, which changes nothing: gconfig says how completions are sampled", names)
            self._warned |= ignored

    # Requests

    def _endpoint(self, wire: Wire, handle: _Handle) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Write errors in the client's wire format."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handle(request, wire)
            except RefusedError as error:
                return _refusal(wire, error)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                logger.debug("a request could not be read", exc_info=error)
                what = f"{type(error).__name__}: {error}"
                return _refusal(wire, RefusedError(f"the request must be one of {request.path}: got {what}."))

        return answer

    def _session_of(self, request: web.Request) -> tuple[Session, bool]:
        """Return the run of a request, and whether its samples are trained on."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        for key in (bearer, request.headers.get("x-api-key", "")):
            if key in self._sessions:
                return self._sessions[key]
        raise RefusedError(
            "requests must show the key of an open run: got none, another one, or that of a run that has ended. Make a "
            "client for each run, with the api_key that its agent was given.",
            "no_key",
            401,
        )

    async def _serve(self, request: web.Request, wire: Wire) -> web.StreamResponse:
        self._session_of(request)  # refuse strangers before their body is read
        raw = await request.read()
        body = parsed(raw)
        session, is_trained = self._session_of(request)  # the run may have ended meanwhile
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        delivery = session.deliver(wire, raw, body, is_retry=is_retry, is_trained=is_trained)
        try:
            return await self._deliver(request, wire, delivery, is_streamed=bool(body.get("stream")))
        except ConnectionError:
            return web.Response(status=499)  # the client has left
        finally:
            session.leave(delivery)

    async def _deliver(
        self, request: web.Request, wire: Wire, delivery: Delivery, *, is_streamed: bool
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        while not (await asyncio.wait({delivery.task}, timeout=self._heartbeat_s))[0]:
            if response is None:
                response = await _begun(request, is_streamed=is_streamed)
            await response.write(wire.heartbeat if is_streamed else b" ")
        try:
            whole = _written(wire, delivery, is_streamed=is_streamed)
        except RefusedError as error:
            if response is not None and not is_streamed:  # its status is sent; a retry gets the error
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError from error
            delivery.num_delivered += 1
            if response is None:
                return _refusal(wire, error)
            await response.write(wire.error_event(error))
            await response.write_eof()
            return response
        delivery.num_delivered += 1
        try:
            return await _ended(request, response, whole, is_streamed=is_streamed)
        except BaseException:  # includes a client that has left
            delivery.num_delivered -= 1
            raise

    async def _count_tokens(self, request: web.Request, wire: Wire) -> web.StreamResponse:
        session, _ = self._session_of(request)
        call = wire.parse(parsed(await request.read()), session.find)
        return web.json_response({"input_tokens": await session.count_tokens(call)})

    async def _models(self, request: web.Request, _: Wire) -> web.StreamResponse:
        self._session_of(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "arealite"}
        model |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's fields
        page = {"object": "list", "data": [model], "has_more": False}
        return web.json_response(page | {"first_id": "policy", "last_id": "policy"})


def parsed(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body. Raises RefusedError."""
    with contextlib.suppress(ValueError, RecursionError):
        body = orjson.loads(raw)
        if isinstance(body, dict):
            return body
    raise RefusedError(f"the body must be a JSON object: got {raw[:60]!r}. Correct the request.")


def _written(wire: Wire, delivery: Delivery, *, is_streamed: bool) -> bytes:
    """Return the serialized answer. Raises RefusedError even for a defect, as clients would retry a 500."""
    if delivery.task.cancelled():
        raise RefusedError("requests must come before the end of their run: it has just ended.", "run_ended", 409)
    try:
        answer = delivery.task.result()
        if is_streamed:
            return b"".join(wire.events(answer))
        return json.dumps(wire.body(answer), ensure_ascii=False).encode()  # orjson rejects integers of 65 bits
    except RefusedError:
        raise
    except Exception as error:
        logger.warning("a request of an agent could not be answered", exc_info=error)
        message = f"the request must be one that can be answered: got {type(error).__name__}: {error}. Change it."
        raise RefusedError(message, code="not_answered") from error


async def _begun(request: web.Request, *, is_streamed: bool) -> web.StreamResponse:
    kind = "text/event-stream" if is_streamed else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def _ended(
    request: web.Request, response: web.StreamResponse | None, rest: bytes, *, is_streamed: bool
) -> web.StreamResponse:
    """Write the rest of a reply. Raises ConnectionError if the client has left."""
    if response is None and not is_streamed:
        response = web.Response(body=rest, content_type="application/json")
        await response.prepare(request)
    else:
        response = response or await _begun(request, is_streamed=is_streamed)
        await response.write(rest)
    await response.write_eof()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError
    return response


def _refusal(wire: Wire, error: RefusedError) -> web.Response:
    return web.json_response(wire.error(error), status=error.status, headers=_NEVER_AGAIN)

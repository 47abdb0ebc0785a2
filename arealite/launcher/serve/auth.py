"""Guards a server that runs in this process, as ASGI middleware: only `GET /health` answers without the secret.

It runs in the environments of SGLang and vLLM, so it needs the standard library alone.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from arealite.utils.secret import is_authorized, refusal, secret_of_environment

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireSecret:
    """Refuses HTTP requests and websockets that do not show the secret of the environment, whatever their path."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret = secret_of_environment()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if self._secret is None or scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            message = refusal(scope["method"], scope["path"])
            body = json.dumps({"success": False, "message": message, "error": {"message": message}}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_open(self, scope: Message) -> bool:
        if (scope.get("method"), scope["path"]) == ("GET", "/health"):
            return True
        shown = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        return self._secret is not None and is_authorized(shown, self._secret)

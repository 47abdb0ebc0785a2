"""What our wrappers of SGLang and vLLM share: the command line, what it refuses, and the guard of the server.

They run in the environments of SGLang and vLLM, so this needs the standard library alone.
"""

import difflib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any, NoReturn, TypeVar

from arealite.api.errors import REFUSED, ConfigError
from arealite.api.script import show_refusal
from arealite.utils.secret import is_authorized, refusal, secret_of_environment

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def wrap(
    argv: Sequence[str] | None, check: Callable[[list[str]], tuple[T, dict[str, object]]], serve: Callable[[T], None]
) -> int:
    """Check flags, then become the server; `--check` starts nothing and prints what was found as one line of JSON. A
    refusal ends what is on stderr, and the exit status is 2, before a model is loaded."""
    flags = list(sys.argv[1:] if argv is None else argv)
    is_check = "--check" in flags
    try:
        checked, description = check([flag for flag in flags if flag != "--check"])
    except ConfigError as error:
        show_refusal(error, name=f"{ConfigError.__module__}.ConfigError")
        return REFUSED
    if is_check:
        print(json.dumps(description))
    else:
        serve(checked)
    return 0


def strict(parser: type[Any], *, program: str, block: str) -> type[Any]:
    """Return the class of a server's parser that raises our errors instead of printing its usage."""

    class Parser(parser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(explain(message, self._option_string_actions, program=program, block=block))

    return Parser


def explain(message: str, options: Collection[str], *, program: str, block: str) -> str:
    """Explain in one line what a parser with these `options` refused, with those that resemble unknown flags."""
    unknown = re.findall(r"--[\w.-]+", message) if message.startswith("unrecognized arguments") else []
    close = {flag: difflib.get_close_matches(flag, options, n=2, cutoff=0.75) for flag in unknown}
    advice = [f"Write {' or '.join(names)} for {flag}." for flag, names in close.items() if names]
    what = f"flags of {program} must be {'known to the installed version' if unknown else 'valid'}"
    return f"{what}: got {message}. {' '.join(advice) or f'Correct the {block} block.'}"


class RequireSecret:
    """ASGI middleware that refuses requests and websockets without the secret of the environment, whatever their path;
    only `GET /health` answers without it."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret = secret_of_environment()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if self._secret is None or scope["type"] == "lifespan" or self._is_open(scope, self._secret):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            message = refusal(scope["method"], scope["path"])
            body = json.dumps({"success": False, "message": message, "error": {"message": message}}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_open(self, scope: Message, secret: str) -> bool:
        if (scope.get("method"), scope["path"]) == ("GET", "/health"):
            return True
        return is_authorized(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"), secret)

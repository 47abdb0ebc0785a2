"""Serves the viewer's page and its data over HTTP, on loopback, to clients with the token.

The page holds no data and needs no token; everything below `/api/` needs the token in a header, never in a path or a
cookie. All requests only read. Status: 304 if a run has not changed; 400 for damaged files and wrong queries; 401
without the token; 421 for a host name other than loopback. Rows of an earlier generation are answered as `stale` with
status 200, because runs resume.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from plotly.offline import get_plotlyjs

from arealite.api.errors import AReaLiteError, ConfigError
from arealite.utils.files import FileError
from arealite.utils.secret import is_authorized, is_loopback
from arealite.viewer.index import StaleIndexError
from arealite.viewer.plain import to_json
from arealite.viewer.report import PAGE, freeze
from arealite.viewer.runs import Runs, RunView

MAX_EXPORTED = 2000  # trajectories of one page
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # Plotly writes styles and draws its exports as images
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_UNAUTHORIZED = "each request must show the token: got none, or another. Open the address that `arealite view` printed."
_OTHER_NAME = "the viewer must be asked for as 127.0.0.1 or localhost: got {}. Open the address that it printed."

_QUESTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rows": (RunView.rows, ("generation", "start")),
    "row": (RunView.row, ("generation", "row")),
    "snippets": (RunView.snippets, ("generation", "rows")),
    "search": (RunView.search, ("generation", "text", "start", "end")),
    "prompt": (RunView.prompt, ("prompt",)),
    "untrained": (RunView.untrained, ()),
    "evaluations": (lambda view: {"evaluations": view.evaluations()}, ()),
}
"""Questions about a run below `/api/`, with the names of their query arguments."""


class Viewer:
    """Answers about the runs below a folder."""

    def __init__(self, folder: Path, token: str) -> None:
        self._runs, self._token = Runs(folder), token
        self._files = {path.name: path.read_bytes() for path in PAGE.iterdir()}
        self._files["plotly.js"] = get_plotlyjs().encode()
        self.app = web.Application(middlewares=[self._guard])
        self.app.add_routes(
            [
                web.get("/", self._page),
                web.get("/files/{name}", self._file),
                web.get("/api/runs", self._list),
                web.get("/api/run", self._run),
                web.get("/api/{question}", self._answer),
                web.post("/api/export", self._export),
            ]
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check host name and token, and turn errors into answers."""
        is_open = not request.path.startswith("/api/")
        if not is_loopback(urlsplit(f"//{request.host}").hostname or ""):  # another name may be DNS rebinding
            response: web.StreamResponse = _json({"error": _OTHER_NAME.format(request.host)}, status=421)
        elif not is_open and not is_authorized(request.headers.get("Authorization"), self._token):
            response = _json({"error": _UNAUTHORIZED}, status=401)
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _json({"error": error.reason}, status=error.status)
            except StaleIndexError as error:
                response = _json({"stale": str(error)})  # an error status would show up in the browser's console
            except (AReaLiteError, FileError) as error:
                response = _json({"error": f"{type(error).__name__}: {error}"}, status=400)
        response.headers.update(_HEADERS)
        return response

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._files["view.html"], content_type="text/html", charset="utf-8")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files or (kind := _TYPES.get(Path(name).suffix)) is None:
            raise web.HTTPNotFound
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8")

    async def _list(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._runs.table))

    async def _run(self, request: web.Request) -> web.Response:
        known = re.sub(r'^"|"$', "", request.headers.get("If-None-Match", ""))
        tag, page = await asyncio.to_thread(self._view(request).describe, known)
        return web.Response(status=304) if page is None else _json(page, headers={"ETag": f'"{tag}"'})

    async def _answer(self, request: web.Request) -> web.Response:
        """Answer a question of `_QUESTIONS` about a run."""
        if (question := _QUESTIONS.get(request.match_info["question"])) is None:
            raise web.HTTPNotFound
        ask, names = question
        view = self._view(request)
        return _json(await asyncio.to_thread(ask, view, *(_argument(request, name) for name in names)))

    async def _export(self, request: web.Request) -> web.Response:
        """Answer with a standalone page about the rows whose numbers are in the body."""
        generation = _number("generation", _word(request, "generation"))
        numbers = [_number("rows", word) for word in (await request.read()).decode(errors="replace").split(",")]
        if len(numbers) > MAX_EXPORTED:
            raise ConfigError(f"an export must hold at most {MAX_EXPORTED} rows: got {len(numbers)}. Filter more.")
        page = await asyncio.to_thread(freeze, self._view(request), generation, numbers)
        return web.Response(text=page, content_type="text/html")

    def _view(self, request: web.Request) -> RunView:
        return self._runs.view(_word(request, "run"))


def _argument(request: web.Request, name: str) -> str | int | list[int]:
    """Return a query argument as text, list of numbers or number."""
    word = _word(request, name)
    if name in ("text", "prompt"):
        return word
    return [_number(name, number) for number in word.split(",")] if name == "rows" else _number(name, word)


def _number(name: str, word: str) -> int:
    if not re.fullmatch("-?[0-9]{1,15}", word):
        raise ConfigError(f"{name} must be a whole number: got {word!r}.")
    return int(word)


def _word(request: web.Request, name: str) -> str:
    if name not in request.query:
        raise ConfigError(f"the query must have {name}: got {request.query_string!r}.")
    return request.query[name]


def _json(value: Any, **options: Any) -> web.Response:
    return web.Response(body=to_json(value), content_type="application/json", **options)

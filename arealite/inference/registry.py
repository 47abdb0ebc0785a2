"""The list of a run's inference servers, an HTTP endpoint. One process of the run keeps it, in memory.

A server that is ready posts its entry every few seconds, so the list of a run that starts again fills by itself;
trainers wait for changes by long-polling. An entry stays until its server, the launcher or a trainer that finds the
server dead removes it. Invariant: the entry of an incarnation that was removed can't be posted again; a server that
lives nevertheless takes a new incarnation, and trainers treat it as started anew.
"""

import asyncio
import contextlib
import json
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import AfterValidator, Field, TypeAdapter

from arealite.utils.files import FileError, reading, write_atomically
from arealite.utils.http_server import HttpServer
from arealite.utils.network import LOOPBACK, check_address
from arealite.utils.secret import authorization, check_exposed, is_authorized, refusal, without_secret

POLL_S = 10.0  # longest time that the registry keeps a long-poll open
DEADLINE_S = 5.0  # within which the registry must answer anything else
_MAX_BYTES = 16 * 1024

T = TypeVar("T")


class RegistryError(RuntimeError):
    """The registry does not answer."""


class RegistryRefusedError(RegistryError):
    """The registry answers, and refuses."""


class RemovedError(RegistryRefusedError):
    """The incarnation was removed."""


@dataclass(frozen=True)
class ServerEntry:
    """What trainers know of a server that is ready. Invariant: it has answered at this address."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,200}$")]
    address: Annotated[str, AfterValidator(check_address)]  # host:port
    backend: str
    incarnation: Annotated[str, Field(min_length=1, max_length=64)]  # unique to one life of a server


@dataclass(frozen=True)
class View:
    """The servers by incarnation, at one moment."""

    boot: str  # unique to the process that keeps the list
    moment: str  # differs after every change
    servers: dict[str, ServerEntry]


_ENTRY = TypeAdapter(ServerEntry)
_VIEW = TypeAdapter(View)
_DONE = TypeAdapter(Literal["done"])
_REFUSED = TypeAdapter(dict[str, str])


class Registry:
    """Keeps the list and serves it over HTTP; lives in one event loop."""

    def __init__(self, secret: str | None) -> None:
        self.address = ""  # host:port, once it listens
        self.servers: dict[str, ServerEntry] = {}  # by incarnation
        self._removed: set[str] = set()  # incarnations
        self._secret = secret
        self._boot = uuid.uuid4().hex
        self._num_changes = 0
        self._changed = asyncio.Event()
        self._file: Path | None = None
        self._text = ""
        app = web.Application(client_max_size=_MAX_BYTES, middlewares=[self._guard])
        app.add_routes([web.get("/servers", self._get), web.post("/servers", self._post)])
        app.add_routes([web.delete("/servers", self._delete)])
        self._http = HttpServer(app, secret)

    async def start(self, host: str = LOOPBACK, file: Path | None = None) -> None:
        """Listen, and write the address to the run's registry.json. Raises ValueError or OSError."""
        check_exposed(host, self._secret)
        port = await self._http.start(host)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if file is not None:
            self._file = file
            self._text = json.dumps({"address": self.address, "node": platform.node(), "pid": os.getpid()})
            write_atomically(file, self._text)

    async def close(self) -> None:
        """Stop listening, and remove the file unless it is already that of the next registry."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._file.read_text(encoding="utf-8") == self._text:
                    self._file.unlink()
        self._note_change()  # ends the long-polls
        await self._http.close()

    async def watch(self, moment: str | None = None, timeout_s: float = POLL_S) -> View:
        """Return the servers as soon as they have changed since `moment`, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while moment == self._moment:
                    await self._changed.wait()
        return View(self._boot, self._moment, dict(self.servers))

    async def put(self, entry: ServerEntry) -> None:
        """Add the entry of a server, in place of another one at its address, or change it. Raises RemovedError."""
        if entry.incarnation in self._removed:
            raise RemovedError(f"{entry.name} must not be posted again: this incarnation of it was removed")
        for other in list(self.servers.values()):
            if other.address == entry.address and other.incarnation != entry.incarnation:
                self._remove(other.incarnation)
        if self.servers.get(entry.incarnation) != entry:
            self.servers[entry.incarnation] = entry
            self._note_change()

    async def remove(self, incarnation: str) -> None:
        """Remove an entry for good."""
        self._remove(incarnation)

    def remove_named(self, name: str) -> None:
        """Remove the entries of a name, whose servers have ended."""
        for incarnation in [one.incarnation for one in self.servers.values() if one.name == name]:
            self._remove(incarnation)

    def _remove(self, incarnation: str) -> None:
        self._removed.add(incarnation)
        if self.servers.pop(incarnation, None) is not None:
            self._note_change()

    @property
    def _moment(self) -> str:
        return f"{self._boot}-{self._num_changes}"

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed.set()  # wakes only current waiters
        self._changed.clear()

    # HTTP

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._secret and not is_authorized(request.headers.get("Authorization"), self._secret):
            return _refuse(401, refusal(request.method, request.path))
        try:
            return await handler(request)
        except (ValueError, web.RequestPayloadError) as error:
            return _refuse(400, f"{request.method} {request.path} is not understood: {error}")
        except RemovedError as error:
            return _refuse(410, str(error))

    async def _get(self, request: web.Request) -> web.Response:
        wait_s = float(request.query.get("wait_s", 0))
        if not wait_s >= 0:  # also NaN
            raise ValueError(f"wait_s must be 0 or more: got {wait_s}")
        view = await self.watch(request.query.get("after"), min(wait_s, POLL_S))
        return web.json_response(asdict(view))

    async def _post(self, request: web.Request) -> web.Response:
        await self.put(_ENTRY.validate_json(await request.read()))
        return web.json_response("done")

    async def _delete(self, request: web.Request) -> web.Response:
        await self.remove(request.query.get("incarnation", ""))
        return web.json_response("done")


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


class RegistryClient:
    """Asks the registry of a run. Its methods raise RegistryError, at once or by a deadline."""

    def __init__(self, where: str | Path, secret: str | None) -> None:
        """`where` is host:port, or the path of the run's registry.json, which is read for every request: a run that was
        started again has another address."""
        self.address = str(where)
        self._headers = authorization(secret)

    async def watch(self, moment: str | None = None, timeout_s: float = POLL_S) -> View:
        """Return the servers as soon as they have changed since `moment`, or after `timeout_s` seconds."""
        query = {"wait_s": str(timeout_s)} | ({} if moment is None else {"after": moment})
        return await self._ask(_VIEW, "GET", query)

    async def put(self, entry: ServerEntry) -> None:
        """Add the entry of a server or change it. Raises RemovedError."""
        await self._ask(_DONE, "POST", {}, asdict(entry))

    async def remove(self, incarnation: str) -> None:
        """Remove an entry for good."""
        await self._ask(_DONE, "DELETE", {"incarnation": incarnation})

    async def close(self) -> None:
        """Connections are not kept."""

    async def _ask(self, form: TypeAdapter[T], method: str, query: Mapping[str, str], body: object = None) -> T:
        """Send a request; a reply of another form is not the registry's."""
        address, deadline_s = address_in(self.address)[0], DEADLINE_S + float(query.get("wait_s", 0))
        timeout, url = aiohttp.ClientTimeout(total=deadline_s), f"http://{address}/servers"
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, url, params=query, json=body) as reply,
            ):
                answer = json.loads(without_secret(await reply.read(), self._headers.get("Authorization")))
                if reply.status == 200:
                    return form.validate_python(answer)
                refused = _REFUSED.validate_python(answer)["error"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, RecursionError) as error:
            raise RegistryError(
                f"the registry of the run at {address} must answer within {deadline_s:g} s: got "
                f"{type(error).__name__}: {error}. Check that the run is alive and that this node reaches it."
            ) from None  # the repr of aiohttp's shows the secret
        kind = RemovedError if reply.status == 410 else RegistryRefusedError
        raise kind(f"the registry of the run at {address} refuses: {refused}")


def address_in(where: str) -> tuple[str, str]:
    """Return the address of a registry, and the name of its node if `where` is a file. Raises RegistryError."""
    if not where.endswith(".json"):
        return where, ""
    try:
        with reading(Path(where)):
            content = json.loads(Path(where).read_text(encoding="utf-8"))
            return str(content["address"]), str(content["node"])
    except FileError as error:
        raise RegistryError(
            f"{where} must say where the registry of the run is: got {type(error.__cause__ or error).__name__}. "
            "It is there while the run lasts."
        ) from error

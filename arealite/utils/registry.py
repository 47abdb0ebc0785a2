"""The registry of a run: which inference servers it has. One process of the run keeps it, and it ends with the run.

A server registers under a name, with a lease that it renews; trainers wait for changes by long-polling. Invariants: an
entry ends within one lease of its owner; an owner that was replaced or removed can't change the entry again; what an
owner sends takes effect in the order in which it was sent.
"""

import asyncio
import contextlib
import json
import math
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
State = Literal["loading", "ready", "leaving"]


class RegistryError(RuntimeError):
    """The registry does not answer."""


class RegistryRefusedError(RegistryError):
    """The registry answers, and refuses."""


@dataclass(frozen=True)
class ServerRecord:
    """What trainers know of a server. Invariant: `ready` was answered by the server itself, at this address."""

    address: Annotated[str, AfterValidator(check_address)]  # host:port
    backend: str
    node: str  # name of its node
    # Process id of the program that runs it: another one is another server, even at the same address.
    pid: Annotated[int, Field(ge=0)]
    state: State
    detail: str  # what it is doing; while it loads, the last line of its log
    since: Annotated[float, Field(allow_inf_nan=False)]  # when the state began, in Unix time


@dataclass(frozen=True)
class Claim:
    """What an owner sends to register a server, and again to renew the lease."""

    record: ServerRecord
    owner: str  # unique to the process that registers
    number: Annotated[int, Field(ge=0)]  # counts what the owner has sent; an older message that arrives late is refused
    lease_s: Annotated[float, Field(gt=0, le=3600)]
    is_first: bool  # whether the entry of another owner is replaced; later claims must not take the name back


@dataclass(frozen=True)
class View:
    """The registered servers by name, as they were at one moment."""

    moment: str  # differs after every change
    servers: dict[str, ServerRecord]


_CLAIM = TypeAdapter(Claim)
_VIEW = TypeAdapter(View)
_IS_NEW = TypeAdapter(bool)
_NOTHING = TypeAdapter(None)
_REFUSED = TypeAdapter(dict[str, str])


class Registry:
    """Keeps the registry and answers for it over HTTP; lives in one event loop."""

    def __init__(self, secret: str | None) -> None:
        self.address = ""  # host:port, once it listens
        self.servers: dict[str, ServerRecord] = {}  # the registered servers by name
        self._secret = secret
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._owners: dict[str, str] = {}  # the last owner of each name, also after its lease has ended
        self._last: dict[str, float] = {}  # the last number of each owner; infinite for one replaced or removed
        self._boot = uuid.uuid4().hex
        self._num_changes = 0
        self._changed = asyncio.Event()
        self._file: Path | None = None
        self._text = ""
        app = web.Application(client_max_size=_MAX_BYTES, middlewares=[self._guard])
        app.router.add_get("/servers", self._get)
        app.router.add_put(r"/servers/{name:[\w.-]{1,200}}", self._put)
        app.router.add_delete(r"/servers/{name:[\w.-]{1,200}}", self._delete)
        self._http = HttpServer(app, secret)

    async def start(self, host: str = LOOPBACK, file: Path | None = None) -> None:
        """Listen, and write where to the run's registry.json. Raises ValueError or OSError."""
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
        for lease in self._leases.values():
            lease.cancel()
        self._note_change()  # ends the long-polls
        await self._http.close()

    async def watch(self, moment: str | None = None, timeout_s: float = POLL_S) -> View:
        """Return the servers as soon as they have changed since `moment`, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while moment == self._moment:
                    await self._changed.wait()
        return View(self._moment, dict(self.servers))

    def remove(self, name: str) -> None:
        """Remove the entry of a server that has ended; what its owner may still send is refused."""
        if name in self._owners:
            self._last[self._owners[name]] = math.inf
        if name in self.servers:
            self._drop(name)

    def claim(self, name: str, claim: Claim) -> bool:
        """Register a server or renew its lease, and tell whether it was not registered. Raises RegistryRefusedError."""
        self._advance(claim.owner, claim.number)
        before = self._owners.get(name, claim.owner)
        is_new = name not in self.servers or before != claim.owner
        if before != claim.owner:
            if name in self.servers and not claim.is_first:
                raise RegistryRefusedError(f"the name {name} must be free: another server has registered under it")
            self._last[before] = math.inf
        if name in self._leases:
            self._leases[name].cancel()
        self._leases[name] = asyncio.get_running_loop().call_later(claim.lease_s, self._drop, name)
        self._owners[name] = claim.owner
        if self.servers.get(name) != claim.record:
            self.servers[name] = claim.record
            self._note_change()
        return is_new

    def withdraw(self, name: str, owner: str, number: int) -> None:
        """Remove the entry of an owner, if it has one. Raises RegistryRefusedError."""
        self._advance(owner, number)
        if name in self.servers and self._owners[name] == owner:
            self._drop(name)

    @property
    def _moment(self) -> str:
        return f"{self._boot}-{self._num_changes}"

    def _advance(self, owner: str, number: int) -> None:
        last = self._last.get(owner, -1)
        if number <= last:
            what = "the server was removed or replaced" if last == math.inf else f"{last} was the last one"
            raise RegistryRefusedError(f"messages of a server must come in order: got number {number}, and {what}")
        self._last[owner] = number

    def _drop(self, name: str) -> None:
        self._leases.pop(name).cancel()
        del self.servers[name]
        self._note_change()

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed.set()  # wakes those who wait now, not later ones
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
        except RegistryRefusedError as error:
            return _refuse(409, str(error))

    async def _get(self, request: web.Request) -> web.Response:
        wait_s = float(request.query.get("wait_s", 0))
        if not wait_s >= 0:  # also NaN
            raise ValueError(f"wait_s must be 0 or more: got {wait_s}")
        view = await self.watch(request.query.get("after"), min(wait_s, POLL_S))
        return web.json_response(asdict(view))

    async def _put(self, request: web.Request) -> web.Response:
        claim = _CLAIM.validate_json(await request.read())
        return web.json_response(self.claim(request.match_info["name"], claim))

    async def _delete(self, request: web.Request) -> web.Response:
        owner, number = request.query.get("owner", ""), int(request.query.get("number", -1))
        self.withdraw(request.match_info["name"], owner, number)
        return web.json_response(None)


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
        return await self._ask(_VIEW, "GET", "/servers", query)

    async def claim(self, name: str, claim: Claim) -> bool:
        """Register a server or renew its lease, and tell whether it was not registered."""
        return await self._ask(_IS_NEW, "PUT", f"/servers/{name}", {}, asdict(claim))

    async def withdraw(self, name: str, owner: str, number: int) -> None:
        """Remove the entry of an owner, if it has one."""
        await self._ask(_NOTHING, "DELETE", f"/servers/{name}", {"owner": owner, "number": str(number)})

    async def close(self) -> None:
        """Connections are not kept."""

    async def _ask(
        self, form: TypeAdapter[T], method: str, path: str, query: Mapping[str, str], body: object = None
    ) -> T:
        """Send a request; what answers it in another form is no registry."""
        address, deadline_s = address_in(self.address)[0], DEADLINE_S + float(query.get("wait_s", 0))
        timeout, url = aiohttp.ClientTimeout(total=deadline_s), f"http://{address}{path}"
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
        raise RegistryRefusedError(f"the registry of the run at {address} refuses: {refused}")


def address_in(where: str) -> tuple[str, str]:
    """Return the address of a registry, and the name of its node if `where` is a file. Raises RegistryError."""
    if not where.endswith(".json"):
        return where, ""
    try:
        with reading(Path(where)):
            found = json.loads(Path(where).read_text(encoding="utf-8"))
            return str(found["address"]), str(found["node"])
    except FileError as error:
        raise RegistryError(
            f"{where} must say where the registry of the run is: got {type(error.__cause__ or error).__name__}. "
            "It is there while the run lasts."
        ) from error

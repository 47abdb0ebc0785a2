"""Removes servers that do not answer or fail, and restores them once they answer.

A server that has been silent for a while is asked for /health, soon if it has requests in flight. If that fails it is
removed, and its requests go to other servers, until it answers again. Invariant: a request waits for a dead server no
longer than about `quiet_s + 2 * health_s` while another server serves, else until the dead one returns.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Literal

import aiohttp

from arealite.api.errors import ServerError, UnreachableError
from arealite.inference.http import OutOfFilesError, ServerConnection, StatusError, deadline_in
from arealite.inference.pool import Server, ServerPool, backoff_s
from arealite.utils.background import BackgroundTasks

logger = logging.getLogger("arealite.client")

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0
_MAX_SICK_PAUSE_S = 60.0
_SLOW_SHARE = 0.25  # of the usual duration of a request, which one may spend at a slow server
_MAX_HEALTH_CALLS = 50.0  # per second, however many servers


class MovedError(ServerError):
    """The request goes to another server."""


class Health:
    """Watches the serving servers; lives in one event loop."""

    quiet_s, idle_s = 4.0, 15.0  # silence after which a server with and without requests is asked for /health
    young_s = 60.0  # in which a request is young enough to be moved to a server that joins
    health_s, dead_s = 8.0, 20.0  # deadline of the answer; a removed server that does not return in `dead_s` is dead

    def __init__(self, session: aiohttp.ClientSession, servers: ServerPool, may_generate: asyncio.Event) -> None:
        """No server is examined while `may_generate` is cleared: a paused one may be silent."""
        self.session = session
        self._servers = servers
        self._may_generate = may_generate
        self.on_dead: Callable[[Server], None] = lambda server: None  # called for a dead one
        self._timeouts: dict[Server, dict[asyncio.Timeout, float]] = {}  # one per request in flight, and its start
        self._update_calls: dict[Server, dict[asyncio.Timeout, float]] = {}  # the same of calls of a weight update
        self._tasks = BackgroundTasks("watching which servers answer", logger)
        self._tasks.start(self._watch())

    @contextlib.asynccontextmanager
    async def in_flight(self, server: Server, *, is_update: bool = False) -> AsyncIterator[None]:
        """Watch the server of the block's request; UnreachableError if it is dead while another one is alive, or if it
        is dead in a weight update: a node that is gone closes no connection."""
        calls = self._update_calls if is_update else self._timeouts
        timeouts = calls.setdefault(server, {})
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                timeouts[timeout] = asyncio.get_running_loop().time()
                yield
        except TimeoutError:
            if server.state == "serving" and not is_update:
                raise MovedError from None
            raise UnreachableError(
                f"a request to http://{server.address} must reach a live server: got no sign of life within "
                f"{self.health_s:g} s. Look at its log; the run goes on without it."
            ) from None
        finally:
            timeouts.pop(timeout, None)
            if not timeouts:
                calls.pop(server, None)
        if is_update:
            return
        server.heard_at = asyncio.get_running_loop().time()
        server.num_failures = 0  # a good answer ends a series of errors

    def balance(self) -> None:
        """Take the youngest requests away from serving servers with more than their share of all, as some must be idle:
        what is lost has been sampled in the last `young_s` seconds."""
        now, serving = asyncio.get_running_loop().time(), self._servers.serving if self._timeouts else []
        share = math.ceil(sum(server.num_in_flight for server in serving) / max(1, len(serving)))
        for server in serving:
            youngest = reversed(self._timeouts.get(server, {}).items())
            for timeout, began in itertools.islice(youngest, max(0, server.num_in_flight - share)):
                if now - began < self.young_s:
                    timeout.reschedule(now)

    def _relieve_slow(self) -> None:
        """Take requests away from slow servers while another one has a free slot, before they have taken long: they
        would hold up the batch."""
        servers, now = self._servers, asyncio.get_running_loop().time()
        slow = [server for server in self._timeouts if server.state == "serving" and servers.is_slow(server)]
        if slow and any(one.num_free > 0 and not servers.is_slow(one) for one in servers.serving):
            most_s = max(self.quiet_s, _SLOW_SHARE * (servers.usual_s or 0.0))
            for timeout, began in [pair for server in slow for pair in self._timeouts[server].items()]:
                if now - began > most_s:
                    timeout.reschedule(now)

    def suspect(self, server: Server) -> None:
        """Remove a server until it answers /health."""
        if server.state != "removed":
            self.remove(server, _FIRST_PAUSE_S, _MAX_SICK_PAUSE_S)
            what = "others take over" if self._servers.serving else "and no other can take over"
            logger.warning("server %s does not answer, %s", server.address, what)

    def remove(self, server: Server, first_s: float, max_s: float) -> float:
        """Remove a server for a pause, then until it answers /health; each failure in a row doubles the pause, because
        a server that fails may answer. Return the pause in seconds."""
        server.num_failures += 1
        pause_s = backoff_s(server.num_failures, first_s, max_s)
        self._servers.suspend(server)
        self._tasks.start(self._readmit(server, pause_s), ("readmit", server))
        return pause_s

    async def dead_among(self, servers: Iterable[Server]) -> list[Server]:
        """Return the servers of an update that don't answer, and remove them until they do. Any answer counts: SGLang
        does not answer /health while it is paused."""
        asked = list(servers)
        answers = await asyncio.gather(*(self._answers(one.address, "/", self.health_s) for one in asked))
        dead = [server for server, is_alive in zip(asked, answers, strict=True) if is_alive is False]
        for server in dead:
            self.suspect(server)
        return dead

    async def answers_by(self, deadline: float, address: str, endpoint: str = "/health") -> bool:
        """GET an endpoint with growing pauses until it answers; return whether it did by the deadline."""
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while (left_s := deadline - loop.time()) > 0:
            if await self._answers(address, endpoint, min(left_s, self.health_s)):
                return True
            await asyncio.sleep(min(pause_s, max(0.0, deadline - loop.time())))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return False

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.quiet_s / 4)
            self._relieve_slow()
            now, serving = asyncio.get_running_loop().time(), self._servers.serving
            at_most_s = len(serving) / _MAX_HEALTH_CALLS
            for server in dict.fromkeys([*self._timeouts, *serving]):
                quiet_s = max(self.quiet_s if server in self._timeouts else self.idle_s, at_most_s)
                if now - server.heard_at > quiet_s and self._may_generate.is_set():
                    self._tasks.start(self._examine(server), ("examine", server))
            for server, calls in self._update_calls.items():
                if now - max(min(calls.values()), server.heard_at) > self.quiet_s:
                    self._tasks.start(self._examine(server, "/"), ("examine in an update", server))

    async def _examine(self, server: Server, endpoint: Literal["/health", "/"] = "/health") -> None:
        """Ask a silent server for /health; if that fails, take its requests away when another server serves. In an
        update, any answer counts."""
        asked_at, is_update = asyncio.get_running_loop().time(), endpoint == "/"
        if await self._answers(server.address, endpoint, self.health_s) is not False:
            server.heard_at = asked_at
        if server.heard_at >= asked_at or not (is_update or self._may_generate.is_set()):
            return
        self.suspect(server)
        if is_update or self._servers.serving or server not in self._servers.servers:
            for timeout in (self._update_calls if is_update else self._timeouts).get(server, ()):
                timeout.reschedule(asked_at)

    async def _readmit(self, server: Server, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        dead_at = deadline_in(self.dead_s)
        while server in self._servers.servers:
            if await self.answers_by(deadline_in(self.health_s), server.address):
                self._servers.restore(server)
                logger.warning("server %s answers again", server.address)
                return
            if asyncio.get_running_loop().time() > dead_at:
                self.on_dead(server)

    async def _answers(self, address: str, endpoint: str, timeout_s: float) -> bool | None:
        """Ask a server once, any status of success counts; None if this process has no file left to ask."""
        try:
            await ServerConnection(self.session, address, deadline_in(timeout_s)).fetch("GET", endpoint)
        except StatusError as error:
            # There need not be a page at /; a status above is of a proxy without its server.
            return endpoint == "/" and error.status < 500
        except OutOfFilesError:
            return None
        except ServerError:
            return False
        return True

"""Keeps the pool of servers in step with the run's registry: registered servers join, departed ones are removed.

A server is contacted in the background and joins; once weights were updated, its own are unknown, so it gets requests
only after the next update. A failed contact is repeated with backoff, unless the server refuses or does not fit. A
member leaves when its entry vanishes, or when it does not answer /health for long. Invariant: a registry that does not
answer changes nothing, and one that has started anew, with an empty list, removes nobody.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError, UnreachableError
from arealite.api.run_folder import RunFolder
from arealite.inference.completions import Completions
from arealite.inference.http import StatusError, deadline_in
from arealite.inference.pool import Server, backoff_s, parse_addresses
from arealite.inference.registry import Registry, RegistryClient, RegistryError, ServerEntry, View
from arealite.utils.background import BackgroundTasks
from arealite.utils.network import LOOPBACK
from arealite.utils.processes import REGISTRY_VARIABLE, SERVER_ADDRS_VARIABLE

logger = logging.getLogger("arealite.client")

_TELL_S = 10.0  # between two log lines of a wait for servers
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 60.0  # between two attempts to contact a server
_MAX_OUTAGE_PAUSE_S = 5.0  # between two tries to reach the registry


async def open_registry(config: InferenceEngineConfig, secret: str | None) -> Registry | RegistryClient:
    """Return the registry that the launcher keeps; without a launcher keep it here."""
    if where := os.environ.get(REGISTRY_VARIABLE):
        return RegistryClient(where, secret)
    registry = Registry(secret)
    # Rank 0 runs where torchrun meets its ranks, by an address that the user has chosen for the nodes of the run.
    name, loop = os.environ.get("MASTER_ADDR", LOOPBACK), asyncio.get_running_loop()
    host = str((await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM))[0][4][0])
    await registry.start(host, RunFolder(config).registry if config.fileroot else None)
    return registry


def named_servers(config: InferenceEngineConfig, addr: str | None) -> list[str]:
    """Return the addresses of servers that others start; ConfigError if there are none, nor any of this run."""
    addresses = parse_addresses(addr or config.server_addrs or os.environ.get(SERVER_ADDRS_VARIABLE, ""))
    if config.colocated is not None:
        if addresses:
            raise ConfigError(
                f"rollout.server_addrs and the variable {SERVER_ADDRS_VARIABLE} must be empty with a server in the "
                f"trainer's process: got {', '.join(addresses)}. Remove them, or the '|' in allocation_mode."
            )
        return []
    if not addresses and not config.num_servers:
        raise ConfigError(
            f"rollout.server_addrs or the variable {SERVER_ADDRS_VARIABLE} must name servers, or "
            "rollout.num_servers say how many register: got none of them. Start through a launcher, or set "
            "rollout.server_addrs=[host:port]."
        )
    if not addresses and REGISTRY_VARIABLE not in os.environ and "RANK" not in os.environ:
        words = shlex.join(sys.argv)
        raise ConfigError(
            f"a script that samples must be started by a launcher, which starts its servers: got `python {words}`. "
            f"Type `python3 -m arealite.launcher.local {words}`, or set rollout.server_addrs=[host:port] to use "
            "servers that run already."
        )
    return addresses


class Membership:
    """Watches the registry; lives in one event loop."""

    def __init__(self, completions: Completions, registry: Registry | RegistryClient) -> None:
        self.num_joined = self.num_left = 0  # members that joined after the start of the run, and that were removed
        self._completions, self._registry = completions, registry
        self._config, self._servers, self._health = completions.config, completions.servers, completions.health
        self._view = View("", "", {})  # the last one
        self._taken: dict[str, ServerEntry] = {}  # by address: members, servers being contacted, and rejected servers
        self._failures: dict[str, Exception] = {}  # by address: what went wrong at the last contact
        self._outage: RegistryError | None = None
        self._is_started = False
        self._changed = asyncio.Event()  # wakes `wait_for`
        self._tasks = BackgroundTasks("noticing which servers come and go", logger, self._changed.set)
        self._tasks.start(self._watch())
        if not self._config.servers_sleep:  # one that hangs on the trainer's GPU must still be told to sleep
            self._health.on_dead = self._remove_dead

    async def wait_for(self, count: int) -> None:
        """Wait until so many servers are members; raise at once if one does not fit the run."""
        loop = asyncio.get_running_loop()
        deadline, tell_at = deadline_in(self._config.setup_timeout), deadline_in(_TELL_S)
        while len(self._servers.servers) < count:
            self._tasks.check()
            for error in self._failures.values():
                if isinstance(error, ConfigError):
                    raise error
            if loop.time() >= deadline:
                raise ServerError(
                    f"{count} inference servers must be ready within {self._config.setup_timeout:g} s: "
                    f"{self._describe(count)}. Look at their logs, or raise rollout.setup_timeout."
                )
            if loop.time() >= tell_at:
                tell_at = deadline_in(_TELL_S)
                logger.warning("waiting for inference servers: %s", self._describe(count))
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, tell_at)):
                    await self._changed.wait()
        self._is_started = True

    def _describe(self, count: int) -> str:
        if self._outage is not None:
            return f"the registry can't be asked: {self._outage}"
        words = [f"got {len(self._servers.servers)} of {count}"]
        for entry in self._view.servers.values():
            words.append(f"{entry.name} at {entry.address} is ready")
            if entry.address in self._failures:
                words[-1] += f", but: {self._failures[entry.address]}"
        missing = count - len(self._view.servers)
        return "; ".join(words + [f"{missing} did not register at {self._registry.address}"] * (missing > 0))

    async def _watch(self) -> None:
        num_failures = 0
        while True:
            try:
                view = await self._registry.watch(self._view.moment)
            except RegistryError as error:
                if self._outage is None:
                    logger.warning("servers that come and go are not noticed for the time being: %s", error)
                self._outage, num_failures = error, num_failures + 1
                await asyncio.sleep(backoff_s(num_failures, _FIRST_PAUSE_S, _MAX_OUTAGE_PAUSE_S))
                continue
            if self._outage is not None:
                logger.warning("the registry at %s answers again", self._registry.address)
            self._outage, num_failures = None, 0
            if view.moment != self._view.moment:
                before, self._view = self._view, view
                self._compare(before)

    def _compare(self, before: View) -> None:
        """Remove servers whose entry changed, or vanished from the list of one process; contact new ones."""
        ready = {entry.address: entry for entry in self._view.servers.values()}
        for address, entry in list(self._taken.items()):
            if address in ready and ready[address].incarnation != entry.incarnation:
                self._let_go(address, "has started anew")
            elif before.boot == self._view.boot and entry.incarnation in before.servers.keys() - self._view.servers:
                self._let_go(address, "leaves")
        for address, entry in ready.items():
            if address not in self._taken:
                self._taken[address] = entry
                self._tasks.start(self._take(entry))

    def _remove_dead(self, server: Server) -> None:
        """Remove a member that does not answer, also from the registry: a server that lives registers anew."""
        if (entry := self._taken.get(server.address)) is not None:
            self._tasks.start(self._delete(entry), ("delete", entry.incarnation))

    async def _delete(self, entry: ServerEntry) -> None:
        """Keep the member while the registry can't be asked: its entry would not change, and nobody would meet it."""
        with contextlib.suppress(RegistryError):
            await self._registry.remove(entry.incarnation)
            if self._taken.get(entry.address) is entry:
                self._let_go(entry.address, "is gone")

    async def _take(self, entry: ServerEntry) -> None:
        """Contact a server until that succeeds, and add it to the pool, unless it has left meanwhile."""
        address, num_failures = entry.address, 0
        while True:
            failure: Exception | None = None
            try:
                if entry.backend != self._config.backend:
                    raise ConfigError(
                        f"servers of this run must be {self._config.backend}: got {entry.backend} at {address}. "
                        "Start that one with the run's config."
                    )
                facts = await self._completions.meet(address)
            except (ServerError, ConfigError) as error:
                failure = error
                dead_at = deadline_in(self._health.dead_s)
                if isinstance(error, UnreachableError) and not await self._health.answers_by(dead_at, address):
                    logger.warning("server %s could not be met and does not answer /health: %s", address, error)
                    await self._delete(entry)  # else it stays listed as ready, and nobody starts another
            if self._taken.get(address) is not entry:
                return
            if failure is None:
                break
            self._failures[address], num_failures = failure, num_failures + 1
            self._changed.set()
            pause_s = backoff_s(num_failures, _FIRST_PAUSE_S, _MAX_PAUSE_S)
            is_final = isinstance(failure, ConfigError) or (isinstance(failure, StatusError) and failure.status < 500)
            if self._is_started:  # else `wait_for` does
                what = "is turned away" if is_final else f"could not be met, once more in {pause_s:g} s"
                logger.warning("server %s %s: %s", address, what, failure)
            if is_final:
                return
            await asyncio.sleep(pause_s)
        self._failures.pop(address, None)
        self._servers.add(address, facts)
        self._changed.set()
        if self._is_started:
            self.num_joined += 1
            logger.warning("server %s has joined and gets requests once it has the current weights", address)

    def _let_go(self, address: str, why: str) -> None:
        del self._taken[address]
        self._failures.pop(address, None)
        if self._servers.remove(address):
            self.num_left += 1
            logger.warning("server %s %s: %d with current weights are left", address, why, len(self._servers.serving))

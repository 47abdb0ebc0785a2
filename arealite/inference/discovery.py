"""Keeps the pool of servers in step with the run's registry: registered servers join, departed ones are removed.

A server that is ready is contacted in the background and joins with unknown weights, so it gets requests only after a
weight update. A server whose entry vanished is removed only if it does not answer either, because a registry may lose
entries of healthy servers. A failed contact is repeated with backoff, unless the server refuses or does not fit.
Invariant: a registry that does not answer changes nothing.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
import time

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError
from arealite.api.run_folder import RunFolder
from arealite.inference.completions import Completions
from arealite.inference.http import StatusError, deadline_in
from arealite.inference.pool import backoff_s, parse_addresses
from arealite.utils.background import BackgroundTasks
from arealite.utils.network import LOOPBACK
from arealite.utils.processes import REGISTRY_VARIABLE, SERVER_ADDRS_VARIABLE
from arealite.utils.registry import Registry, RegistryClient, RegistryError, ServerRecord

logger = logging.getLogger("arealite.client")

_LOOK_AGAIN_S = 1.0  # between two checks of a member without an entry
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
        self._config, self._servers = completions.config, completions.servers
        self._records: dict[str, ServerRecord] = {}  # by name, as last seen
        self._taken: dict[str, ServerRecord] = {}  # by address: members, servers being contacted, and rejected servers
        self._failures: dict[str, Exception] = {}  # by address: what went wrong at the last contact
        self._outage: RegistryError | None = None
        self._is_started = False
        self._news = asyncio.Event()  # set when `wait_for` has something to look at
        self._tasks = BackgroundTasks("noticing which servers come and go", logger, self._news.set)
        self._tasks.start(self._watch())

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
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(deadline, tell_at)):
                    await self._news.wait()
        self._is_started = True

    def _describe(self, count: int) -> str:
        if self._outage is not None:
            return f"the registry can't be asked: {self._outage}"
        words = [f"got {len(self._servers.servers)} of {count}"]
        for name, record in self._records.items():
            seconds = time.time() - record.since
            words.append(f"{name} at {record.address} is {record.state} ({seconds:.0f} s)")
            if record.state == "loading" and record.detail:
                words[-1] += f": {record.detail}"
            if record.address in self._failures:
                words[-1] += f", but: {self._failures[record.address]}"
        missing = count - len(self._records)
        return "; ".join(words + [f"{missing} did not register at {self._registry.address}"] * (missing > 0))

    async def _watch(self) -> None:
        moment, num_failures = None, 0
        while True:
            try:
                view = await self._registry.watch(moment)
            except RegistryError as error:
                if self._outage is None:
                    logger.warning("servers that come and go are not noticed for the time being: %s", error)
                self._outage, num_failures = error, num_failures + 1
                await asyncio.sleep(backoff_s(num_failures, _FIRST_PAUSE_S, _MAX_OUTAGE_PAUSE_S))
                continue
            if self._outage is not None:
                logger.warning("the registry at %s answers again", self._registry.address)
            self._outage, num_failures = None, 0
            if view.moment != moment:
                moment = view.moment
                self._compare(view.servers)

    def _compare(self, records: dict[str, ServerRecord]) -> None:
        """Remove servers whose entry changed or vanished, and contact new ones."""
        self._records = records
        by_age = sorted(records.values(), key=lambda record: record.since)  # an old entry may outlive its server
        ready = {record.address: record for record in by_age if record.state == "ready"}
        known = {record.address for record in records.values()}
        for address, record in list(self._taken.items()):
            now = ready.get(address)
            if now is not None and (now.node, now.pid, now.since) == (record.node, record.pid, record.since):
                continue
            if address in known:
                self._let_go(address, "has started anew" if address in ready else "leaves")
            elif not self._is_reachable(address):
                self._let_go(address, "is gone")
            else:
                self._tasks.start(self._look_after(address), ("look after", address))
        for address, record in ready.items():
            if address not in self._taken:
                self._taken[address] = record
                self._tasks.start(self._take(record))

    def _is_reachable(self, address: str) -> bool:
        return any(one.address == address and one.state != "removed" for one in self._servers.servers)

    async def _take(self, record: ServerRecord) -> None:
        """Contact a server until that succeeds, and add it to the pool, unless it has left meanwhile."""
        address, num_failures = record.address, 0
        while True:
            failure: Exception | None = None
            try:
                if record.backend != self._config.backend:
                    raise ConfigError(
                        f"servers of this run must be {self._config.backend}: got {record.backend} at {address}. "
                        "Start that one with the run's config."
                    )
                facts = await self._completions.meet(address)
            except (ServerError, ConfigError) as error:
                failure = error
            if self._taken.get(address) is not record:
                return
            if failure is None:
                break
            self._failures[address], num_failures = failure, num_failures + 1
            self._news.set()
            pause_s = backoff_s(num_failures, _FIRST_PAUSE_S, _MAX_PAUSE_S)
            is_final = isinstance(failure, ConfigError) or (isinstance(failure, StatusError) and failure.status < 500)
            if self._is_started:  # else who waits for it tells
                what = "is turned away" if is_final else f"could not be met, once more in {pause_s:g} s"
                logger.warning("server %s %s: %s", address, what, failure)
            if is_final:
                return
            await asyncio.sleep(pause_s)
        self._failures.pop(address, None)
        self._servers.add(address, facts)
        self._news.set()
        if self._is_started:
            self.num_joined += 1
            logger.warning("server %s has joined and gets requests once it has the current weights", address)

    async def _look_after(self, address: str) -> None:
        """Ask a member without an entry for /health until it has one again, or remove it when it does not answer."""
        while address in self._taken and all(record.address != address for record in self._records.values()):
            await self._completions.health.dead_among([one for one in self._servers.servers if one.address == address])
            if not self._is_reachable(address):
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._compare(self._records)

    def _let_go(self, address: str, why: str) -> None:
        del self._taken[address]
        self._failures.pop(address, None)
        if self._servers.remove(address):
            self.num_left += 1
            left = len(self._servers.serving)
            logger.warning("server %s %s: %d with the current weights are left", address, why, left)

"""Which inference servers there are and which one serves a request.

Servers come and go at any time. Invariant: a request goes only to a member that holds the newest published weights, to
a reachable one while there is one, and requests with the same `rid` go to one server (which has their prefix cached)
as long as that may be. A member with other weights, because it joined later, could not be reached or has started anew,
idles until it takes part in a publication.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from arealite.api.errors import ServerError

_MAX_STICKY = 65536
"""Remembered rids; the oldest are forgotten first."""
NO_VERSION = -1
"""Of a server whose weights are unknown."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server has told about itself."""

    dtype: str | None = None
    """In which it computes; None if it does not tell."""
    num_gpus: int = 1
    """Each is a rank of broadcast groups, also if it is a CPU."""
    takes_broadcasts: bool = True


@dataclass(eq=False)
class Server:
    """One server as the client sees it."""

    address: str
    version: int
    """Of the weights that were last published to it."""
    facts: ServerFacts = ServerFacts()
    outstanding_tokens: int = 0
    """Tokens of the requests in flight, prompts and largest completions."""
    num_requests: int = 0
    """Sent so far."""
    is_reachable: bool = True
    tells_versions: bool = False
    """Whether a reply has ever said which weights sampled it."""


class ServerSet:
    """A mutable set of servers, for use from any thread."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._version = 0
        """Of the newest published weights."""
        self._servers: dict[str, Server] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        for address in addresses:
            self.add(address, version=0)

    def add(self, address: str, version: int = NO_VERSION, facts: ServerFacts = ServerFacts()) -> None:
        """Add a server whose weights are `version`; one that is there already stays as it is."""
        with self._lock:
            if address not in self._servers:
                self._servers[address] = Server(address, version, facts)

    def remove(self, address: str) -> None:
        """Send nothing more to a server; requests in flight end as they may."""
        with self._lock:
            self._servers.pop(address, None)

    def note_publication(self, receivers: Iterable[Server], version: int) -> None:
        """Take `version` for the newest, which these servers hold; others get no requests from now on."""
        with self._lock:
            self._version = version
            for server in receivers:
                server.version = version

    def note_loss(self, server: Server, version: int) -> None:
        """Take it that a server no longer holds weights that it once took, unless newer ones have come meanwhile."""
        with self._lock:
            if server.version == version:
                server.version = NO_VERSION

    @property
    def servers(self) -> list[Server]:
        """All members, in the order in which they were added."""
        with self._lock:
            return list(self._servers.values())

    def has_reachable(self) -> bool:
        """Tell whether a reachable member holds the newest weights."""
        with self._lock:
            return any(server.is_reachable and server.version == self._version for server in self._servers.values())

    def pick(self, rid: str, num_tokens: int, avoid: Set[Server] = frozenset()) -> Server:
        """Choose a server for a request, if possible not one to `avoid`, and count its tokens until `release`."""
        with self._lock:
            server = self._sticky_server(rid)
            if server is None or server in avoid:
                server = self._least_loaded(avoid)
            self._sticky[rid] = server.address
            self._sticky.move_to_end(rid)
            if len(self._sticky) > _MAX_STICKY:
                self._sticky.popitem(last=False)
            server.outstanding_tokens += num_tokens
            server.num_requests += 1
            return server

    def release(self, server: Server, num_tokens: int) -> None:
        """Undo the count of `pick`."""
        with self._lock:
            server.outstanding_tokens -= num_tokens

    def _sticky_server(self, rid: str) -> Server | None:
        server = self._servers.get(self._sticky.get(rid, ""))
        is_fit = server is not None and server.is_reachable and server.version == self._version
        return server if is_fit else None

    def _least_loaded(self, avoid: Set[Server]) -> Server:
        members = list(self._servers.values())
        if not members:
            raise ServerError("there must be an inference server: got none. Add one with add_server(address).")
        current = [server for server in members if server.version == self._version]
        if not current:
            raise ServerError(
                f"there must be an inference server with weights of version {self._version}: got versions "
                f"{sorted({server.version for server in members})}. Publish weights, which reach every server."
            )
        reachable = [server for server in current if server.is_reachable]
        best = [server for server in reachable if server not in avoid]
        return min(best or reachable or current, key=lambda server: (server.outstanding_tokens, server.num_requests))


def parse_addresses(text: str | Iterable[str]) -> list[str]:
    """Return `host:port` items from a list or a comma separated string; a scheme and a final slash are dropped."""
    items = text.split(",") if isinstance(text, str) else text
    return [item.strip().removeprefix("http://").rstrip("/") for item in items if item.strip()]

"""The inference servers of a run, and the choice of the server for a request.

Servers come and go at any time, and each is in one of three states. Requests go only to *serving* servers, which hold
the newest weights. A *joining* server gets no requests until a weight update has reached it. A *removed* server did not
answer, or failed in an update: it gets neither, until `Health` has found that it answers again.
"""

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Literal

from arealite.api.errors import ConfigError
from arealite.utils.network import addresses_in

_MAX_STICKY = 65536  # remembered rids; the oldest are forgotten first
_MIN_TOKENS = 8  # shorter completions say more about the prompt than about the server's speed
_MAX_SLOWNESS = 2.0  # how many times as long as usual a token may take at a server that requests go to
_FORGOTTEN_S = 60.0  # after which a slow server without requests gets one, which measures it again
_NUM_AVERAGED = 5  # completions that a server's average is over, besides as many as are in flight
_NUM_USUAL = 50  # completions that the usual duration is over
_NUM_CANDIDATES = 8  # servers that a choice compares: the best of a few is nearly the best of thousands
NO_VERSION = -1  # of a server whose weights are unknown


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself."""

    dtype: str | None = None  # in which it computes; None if it does not tell
    num_gpus: int = 1  # each is a rank of broadcast groups, also if it is a CPU
    takes_broadcasts: bool = True
    model: str | None = None  # the folder or hub id that it has loaded
    vocab_size: int | None = None  # of that model; None if it does not tell
    slots: int | None = None  # requests that it runs at once; None if it does not tell


@dataclass(eq=False)
class Server:
    """One server as the client sees it."""

    address: str
    facts: ServerFacts
    state: Literal["joining", "serving", "removed"] = "joining"
    version: int = NO_VERSION  # of the weights that were last published to it
    frozen: str = ""  # fingerprint of the frozen weights that an update brought to it; "" after it was removed
    group: str = ""  # broadcast group that it has joined; "" once it may be another process
    outstanding_tokens: int = 0  # tokens of the requests in flight, prompts and largest completions
    num_requests: int = 0  # sent so far
    num_in_flight: int = 0
    heard_at: float = 0.0  # when it last replied
    tokens_per_s: float | None = None  # moving average for one request; None before the first completion
    measured_at: float = 0.0  # when that was last measured
    num_failures: int = 0  # times that it was removed since its last completion or weight update
    tells_versions: bool = False  # whether a reply has ever said which weights sampled it

    @property
    def num_free(self) -> float:
        """How many requests it could run besides those in flight."""
        return math.inf if self.facts.slots is None else self.facts.slots - self.num_in_flight


@dataclass(frozen=True)
class PoolView:
    """What a pool of another process must know of this one."""

    version: int
    servers: tuple[tuple[str, ServerFacts, int], ...]  # address, facts, version


class ServerPool:
    """The servers of a run. One thread changes them, any may read them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.on_change: Callable[[], None] | None = None  # called after every change, in the thread that made it
        self.version = 0  # of the newest published weights
        self._started_with = NO_VERSION  # version with which servers are started; unknown after the first update
        self._servers: dict[str, Server] = {}
        self._num_changes = 0
        # Derived after that many changes: the servers by state, and the slots of those that serve.
        self._derived: tuple[int, dict[str, list[Server]], int | None] = (-1, {}, None)
        self._tokens_per_s: float | None = None  # moving average of all servers for one request
        self.usual_s: float | None = None  # moving average of the duration of a request
        self._draw = random.Random(0)
        self._sticky: OrderedDict[str, str] = OrderedDict()  # servers of rids, whose caches end with the weights
        self._shown: dict[str, int] = {}  # versions of the servers of the last view

    def view(self) -> PoolView:
        """Return what `mirror` of another pool takes."""
        return PoolView(self.version, tuple((one.address, one.facts, one.version) for one in self.servers))

    def mirror(self, view: PoolView) -> None:
        """Have the servers of a view, but keep what this pool has found out: who answers, who has lost its weights."""
        shown = {address: version for address, _, version in view.servers}
        self._servers = {address: one for address, one in self._servers.items() if address in shown}
        for address, facts, version in view.servers:
            server = self._servers.setdefault(address, Server(address, facts))
            if self._shown.get(address) != version:
                server.version = version
        self.version, self._shown, self._sticky = view.version, shown, OrderedDict()
        self._settle()

    def lost(self) -> frozenset[tuple[str, int]]:
        """Return the servers that no longer hold the weights that the last view shows, and the versions of these."""
        return frozenset(
            (one.address, self._shown[one.address])
            for one in self.servers
            if NO_VERSION == one.version != self._shown.get(one.address, NO_VERSION)
        )

    def note_lost(self, lost: Iterable[tuple[str, int]]) -> None:
        """Record what another pool has found `lost`, unless newer weights have come meanwhile."""
        for address, version in lost:
            if (server := self._servers.get(address)) is not None:
                self.mark_weights_lost(server, version)

    def add(self, address: str, facts: ServerFacts = ServerFacts()) -> None:
        """Add a server, whose weights are unknown after the first weight update; a member stays as it is."""
        server = self._servers.setdefault(address, Server(address, facts, version=self._started_with))
        self._settle([server])

    def remove(self, address: str) -> bool:
        """Send nothing more to a server; requests in flight end as they may. Return whether it was a member."""
        was_member = self._servers.pop(address, None) is not None
        self._notify()
        return was_member

    def begin(self, version: int) -> None:
        """Trust members, and servers that join before the first weight update, to be started with `version`."""
        self.advance(self.servers, version)
        self._started_with = version

    def advance(self, receivers: Iterable[Server], version: int) -> None:
        """Make `version` the newest one, which these servers hold; others get no requests from now on."""
        self.version, self._started_with, self._sticky = version, NO_VERSION, OrderedDict()
        for server in receivers:
            server.version, server.state, server.num_failures = version, "serving", 0
        self._settle()

    def mark_weights_lost(self, server: Server, version: int) -> None:
        """Record that a server no longer holds weights that it once had, unless newer ones have come meanwhile."""
        if server.version == version:
            server.version, server.group = NO_VERSION, ""
        self._settle([server])

    def suspend(self, server: Server) -> None:
        """Send nothing to a server until `restore`; it may come back as another process."""
        server.state, server.frozen, server.group = "removed", "", ""
        self._notify()

    def restore(self, server: Server) -> None:
        """Use a suspended server again: for requests if it still has the newest weights, else once it gets them."""
        server.state = "joining"
        self._settle([server])

    def _settle(self, changed: Iterable[Server] | None = None) -> None:
        """Derive from the versions who serves and who is joining, of all servers or of those that have changed."""
        for server in self._servers.values() if changed is None else changed:
            if server.state != "removed":
                server.state = "serving" if server.version == self.version else "joining"
        self._notify()

    @property
    def num_slots(self) -> int | None:
        """How many requests the serving servers run at once; None without a server, or if it is unknown of one."""
        return self._derive()[2]

    @property
    def servers(self) -> list[Server]:
        """All members, in the order in which they were added."""
        return list(self._servers.values())

    @property
    def serving(self) -> list[Server]:
        """The servers that get requests."""
        return self._derive()[1]["serving"]

    @property
    def joining(self) -> list[Server]:
        """The servers that wait for the newest weights."""
        return self._derive()[1]["joining"]

    def _derive(self) -> tuple[int, dict[str, list[Server]], int | None]:
        num_changes, derived = self._num_changes, self._derived
        if num_changes != derived[0]:
            by_state: dict[str, list[Server]] = {"serving": [], "joining": [], "removed": []}
            for server in self.servers:
                by_state[server.state].append(server)
            slots = [server.facts.slots for server in by_state["serving"]]
            num_slots = None if not slots or None in slots else sum(number or 0 for number in slots)
            self._derived = derived = num_changes, by_state, num_slots
        return derived

    @property
    def updatable(self) -> list[Server]:
        """The servers that weight updates go to."""
        return [server for server in self.servers if server.state != "removed"]

    def describe(self) -> str:
        """Return the weights of all members, for messages."""
        words = []
        for one in self.servers:
            weights = "unknown weights" if one.version == NO_VERSION else f"weights {one.version}"
            words.append(f"{one.address} with {weights}" + (", removed" if one.state == "removed" else ""))
        return "; ".join(words) or "no server"

    def pick(
        self, rid: str, num_tokens: int, avoid: Set[Server] = frozenset(), freed: Server | None = None
    ) -> Server | None:
        """Choose the serving server with a free slot and the fewest tokens in flight, and count the request until
        `release`; None if there is none: a request that waits here can go to a server that joins meanwhile. A slow
        server, and one to `avoid`, comes last. Requests with the same `rid` stay on one server, which has cached their
        prefix; a request that has waited takes the `freed` slot. Of many servers a few are compared."""
        sticky = self._servers.get(self._sticky.get(rid, ""))
        candidates = [one for one in ([freed] if freed else self._candidates(sticky)) if self._has_slot(one)]
        if not candidates and freed is None:
            candidates = [one for one in self.serving if self._has_slot(one)]
        if not candidates or (set(candidates) <= avoid and not set(self.serving) <= avoid):
            return None
        server = sticky if sticky in candidates and sticky not in avoid else None
        if server is None or self.is_slow(server):

            def order(one: Server) -> tuple[bool, bool, int, int]:
                return one in avoid, self.is_slow(one), one.outstanding_tokens, one.num_requests

            server = min(candidates, key=order)
        self._sticky[rid] = server.address
        self._sticky.move_to_end(rid)
        if len(self._sticky) > _MAX_STICKY:
            self._sticky.popitem(last=False)
        server.outstanding_tokens += num_tokens
        server.num_requests += 1
        server.num_in_flight += 1
        return server

    def _candidates(self, sticky: Server | None) -> list[Server]:
        serving, last = self.serving, [] if sticky is None else [sticky]
        return serving if len(serving) <= _NUM_CANDIDATES else [*self._draw.sample(serving, _NUM_CANDIDATES), *last]

    def _has_slot(self, server: Server) -> bool:
        return server.state == "serving" and server.num_free > 0

    def forget(self, rid: str) -> None:
        """Let the requests of a rid go to any server."""
        self._sticky.pop(rid, None)

    def measure(self, server: Server, num_tokens: int, seconds: float) -> None:
        """Record how long a server took for a completion."""
        if num_tokens >= _MIN_TOKENS:
            speed = num_tokens / max(seconds, 1e-6)
            count = _NUM_AVERAGED + server.num_in_flight
            server.tokens_per_s = _averaged(server.tokens_per_s, speed, count)
            # As many of each server, or else all are slow once the load falls, as that of all follows sooner.
            self._tokens_per_s = _averaged(self._tokens_per_s, speed, count * max(1, len(self.serving)))
            self.usual_s = _averaged(self.usual_s, seconds, _NUM_USUAL)
            server.measured_at = self._clock()

    def is_slow(self, server: Server) -> bool:
        """Tell whether a server is so slow that it gets requests only when others have no slot. One without requests
        is given one after a while, whose speed is the next measurement."""
        if server.tokens_per_s is None or self._tokens_per_s is None:
            return False
        is_known = server.num_in_flight or self._clock() - server.measured_at < _FORGOTTEN_S
        return bool(is_known) and _MAX_SLOWNESS * server.tokens_per_s < self._tokens_per_s

    def release(self, server: Server, num_tokens: int) -> None:
        """Undo the count of `pick`."""
        server.outstanding_tokens -= num_tokens
        server.num_in_flight -= 1

    def _notify(self) -> None:
        self._num_changes += 1
        if self.on_change is not None:
            self.on_change()


def _averaged(old: float | None, new: float, count: int) -> float:
    return new if old is None else old + (new - old) / count


def backoff_s(num_failures: int, first_s: float, max_s: float) -> float:
    """Return the pause after so many failures in a row: doubled by each, up to `max_s`."""
    return min(first_s * 2.0 ** min(num_failures - 1, 60), max_s)  # a float has no power above 1,023


def parse_addresses(text: str | Iterable[str]) -> list[str]:
    """Return what `addresses_in` finds in a list or a comma separated string."""
    try:
        return addresses_in(text)
    except ValueError as error:
        raise ConfigError(f"rollout.server_addrs must name servers: {error}") from error

"""The receiving half of a publication of weights.

A publication pauses every server, brings the weights in, from a checkpoint folder or through a broadcast group, and
lets the servers go on. Requests in flight come back as aborted and the client core continues them later, unless
`rollout.pause_mode` lets them stay. Servers of a broadcast that can't take one read a checkpoint in the same
publication. One that catches up leaves the servers alone that have the newest weights. Servers that can are told the
sender's fingerprints and verify what they got. Invariants: it ends within its deadline; a failure names the server;
after it servers go on, except one that may hold half of the new weights: it has no version until a publication has
reached it whole. A server that died in it, or a newcomer that failed, is out of the next one, which may be tried; who
failed to catch up is left alone for a while, ever longer, if others are there.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import torch

from arealite.api.cli_args import WeightCheckConfig
from arealite.api.errors import ServerError, UnreachableError, WeightUpdateError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.inference.backends.base import Backend, BroadcastPlan, Checksums, ServerConnection
from arealite.inference.health import Liveness
from arealite.inference.pool import NO_VERSION, Server, ServerSet
from arealite.utils.network import LOOPBACK, free_port, host_ip

logger = logging.getLogger("arealite.client")

_CONTINUE_S = 30.0
"""Most that servers may take to go on after a publication, whatever became of it."""
_LISTEN_PAUSE_S = 0.01
_LAST_WORD_S = 1.0
"""In which servers may say what went wrong when the sender has noticed already."""
_FIRST_BENCH_S, _MAX_BENCH_S = 10.0, 600.0
"""How long a server that could not catch up is left alone; twice as long each time."""
_LEAVE_S = 5.0
"""Deadline for servers to leave a group that is no longer used."""


class WeightReceiver:
    """Brings published weights to the members of a server set."""

    def __init__(self, backend: Backend, servers: ServerSet, check: WeightCheckConfig) -> None:
        self.num_mismatched = 0
        """Tensors that a server took although their fingerprints differed."""
        self.members: list[Server] = []
        """Those that the last publication reached."""
        self.may_try_again = False
        """Whether the last one failed because of servers that the next one would be without."""
        self._backend = backend
        self._servers = servers
        self._check = check
        self._plan: BroadcastPlan | None = None
        self._joined: BroadcastPlan | None = None
        self._held: Publication | None = None
        """One whose servers get no requests before `admit`."""
        self._last: Publication | None = None

    async def begin(self, liveness: Liveness, meta: WeightUpdateMeta) -> Publication:
        """Start a publication; servers of a broadcast are paused now, as the sender must know how many there are."""
        meta.wants_fingerprints, meta.fingerprints = self._check.fingerprint and self._backend.verifies(meta), {}
        self._held, self.members, self.may_try_again = None, [], False
        accepts_mismatch = self._check.on_mismatch == "warn"
        publication = Publication(self._backend, liveness, meta, self._servers, accepts_mismatch=accepts_mismatch)
        self._last = publication
        if meta.type == "nccl":
            async with self._undone_on_failure(publication):
                await publication.pause()
                self._agree(publication.members, meta)
        return publication

    async def receive(self, publication: Publication) -> None:
        """Bring the weights in."""
        meta = publication.meta
        async with self._undone_on_failure(publication):
            if meta.type == "disk":
                await publication.wait_for_sender()
                await publication.pause()
                await publication.load_from_disk(publication.members)
            else:
                assert self._plan is not None, "begin has made a plan"
                await publication.unless_sender_fails(self._broadcast(publication, self._plan))
                if meta.also_disk:
                    await publication.wait_for_sender()
                    readers = [server for server in publication.members if server not in self._plan.servers]
                    await publication.load_from_disk(readers)
        self.num_mismatched += publication.num_mismatched
        self.members, self._held = publication.members, publication
        if not meta.holds_requests:
            self.admit()
        await self._go_on(publication, None)

    def admit(self) -> None:
        """Let the servers of a publication get requests, as they are proved or nobody wants to prove them."""
        if self._held is not None:
            self._servers.note_publication(self._held.members, self._held.version)
        self._held = None

    @property
    def has_lost_one(self) -> bool:
        """Tell whether one of those that the last publication was for does not answer any more."""
        return self._last is not None and any(not server.is_reachable for server in self._last.asked)

    def give_up(self) -> None:
        """Take it that the last publication has failed after all: nobody has proved the weights that it brought."""
        for server in self._held.members if self._held else []:
            self._servers.note_loss(server, server.version)
        self._held = None

    def bench(self, why: str) -> None:
        """Leave the servers alone for a while that could not catch up, for no reason of any one of them."""
        for server in self._last.asked if self._last else []:
            if server in self._servers.stale:
                self._bench(server, why)

    def turn_away(self, failures: Mapping[Server, str]) -> dict[Server, str]:
        """Do without servers that failed, if others are there and they are newcomers or were to catch up, and return
        the rest."""
        assert self._last is not None, "servers fail in publications"
        is_catch_up = self._last.meta.only_stale
        reachable = self._servers.live if is_catch_up else [one for one in self._servers.servers if one.is_reachable]
        if not set(reachable) - set(failures):
            return dict(failures)
        rest = {}
        for server, why in failures.items():
            if is_catch_up:
                self._bench(server, why)
            elif server.is_veteran and not server.is_benched:
                rest[server] = why
            elif self._servers.remove(server.address):
                logger.warning("server %s is turned away: %s", server.address, why)
        self.leave_out(failures.keys() - rest.keys())
        return rest

    def leave_out(self, servers: Collection[Server]) -> None:
        """Take it that the last publication has not reached these servers."""
        self.members = [server for server in self.members if server not in servers]
        if self._held is not None:
            self._held.members = self.members

    def _bench(self, server: Server, why: str) -> None:
        pause_s = min(_FIRST_BENCH_S * 2.0**server.num_benched, _MAX_BENCH_S)
        self._servers.note_benched(server, True)
        asyncio.get_running_loop().call_later(pause_s, self._servers.note_benched, server, False)
        logger.warning("server %s gets no weights for %g s, or until the next: %s", server.address, pause_s, why)

    def _agree(self, members: list[Server], meta: WeightUpdateMeta) -> None:
        """Write the broadcast group of these servers into `meta`; that of the last time if they are all still in it."""
        servers = tuple(server for server in members if server.facts.takes_broadcasts)
        meta.also_disk = len(servers) < len(members)
        if meta.also_disk and meta.path is None:
            unable = ", ".join(server.address for server in members if server not in servers)
            raise ServerError(
                f"every server must take weights by broadcast: got {unable}, which can't. Set "
                "rollout.weight_update=disk, or start vLLM by python3 -m arealite.launcher.serve.vllm_server."
            )
        has_left = any(server.version == NO_VERSION for server in servers)  # who has started anew is in no group
        if self._plan is None or self._plan.servers != servers or has_left:
            remote = [server.address.rpartition(":")[0] for server in servers if not _is_local(server.address)]
            address = host_ip(remote[0]) if remote else LOOPBACK
            name = f"{meta.nccl_group_name.partition('#')[0]}#{uuid.uuid4().hex[:8]}"
            backend: Literal["nccl", "gloo"] = (
                "nccl" if torch.cuda.is_available() and not self._backend.is_on_cpu else "gloo"
            )
            self._plan = BroadcastPlan(name, address, free_port(address), backend, servers)
        self._plan.write_to(meta)

    @asynccontextmanager
    async def _undone_on_failure(self, publication: Publication) -> AsyncIterator[None]:
        """Turn what goes wrong into a WeightUpdateError, after the servers went on and left the group."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            plans = {self._plan, self._joined} - {None}
            self._plan = self._joined = None
            if publication.is_torn and not self._backend.keeps_old_weights:
                for server in publication.members:
                    self._servers.note_loss(server, server.version)
                publication.members = []
            if isinstance(error, asyncio.CancelledError):
                await self._go_on(publication, error)
                raise
            # A sender that waits for these peers fails as they leave.
            await asyncio.gather(self._judge(publication), *(publication.leave(plan) for plan in plans if plan))
            await self._go_on(publication, error)
            raise WeightUpdateError(
                f"weights of version {publication.version} must reach every live server within "
                f"{publication.meta.timeout_s:g} s: got {type(error).__name__}: {error}"
            ) from error

    async def _judge(self, publication: Publication) -> None:
        """Find out which servers a publication failed by, and keep those out of the next one."""
        asked, failures = publication.asked, publication.failures
        dead = await publication.liveness.dead_among(asked)
        publication.members = [server for server in publication.members if server not in dead]
        others = {server: str(error) for server, error in failures.items() if server not in dead}
        was_cut = any(isinstance(error, UnreachableError) for error in failures.values())
        has_left = any(server not in self._servers.servers for server in asked)
        self.may_try_again = publication.found_nobody or bool(dead) or was_cut or has_left
        if not self.may_try_again and others:
            self.may_try_again = len(self.turn_away(others)) < len(others)

    async def _broadcast(self, publication: Publication, plan: BroadcastPlan) -> None:
        if self._joined is not plan:
            if self._joined is not None:
                await publication.leave(self._joined)
            self._joined = None
            if plan.servers:
                await publication.join(plan)
            self._joined = plan
        await publication.receive_buckets(plan)

    async def _go_on(self, publication: Publication, failure: BaseException | None) -> None:
        """Let the servers generate again; after a failure, another one is only logged."""
        try:
            await publication.continue_all()
        except ServerError as error:
            if failure is None:
                raise WeightUpdateError(f"every server must go on after an update of its weights: {error}") from error
            logger.warning("a server did not go on after a failed update of its weights: %s", error)
        finally:
            if failure is not None or not publication.meta.holds_requests:
                publication.liveness.may_generate.set()


class Publication:
    """One publication: the calls to the servers, under one deadline."""

    def __init__(
        self,
        backend: Backend,
        liveness: Liveness,
        meta: WeightUpdateMeta,
        servers: ServerSet,
        *,
        accepts_mismatch: bool,
    ) -> None:
        assert meta.version is not None, "the version must be settled before servers are told"
        self.meta = meta
        self.version = meta.version
        self.liveness = liveness
        self.members: list[Server] = []
        """Those that take part, from `pause` on."""
        self.asked: list[Server] = []
        """Those that were to take part."""
        self.found_nobody = False
        """Whether there was no server to pause."""
        self.failures: dict[Server, ServerError] = {}
        """What servers have answered, or why they have not."""
        self.is_torn = False
        """Whether a server may hold some of the new weights."""
        self.num_mismatched = 0
        self._backend = backend
        self._accepts_mismatch = accepts_mismatch
        self._http = liveness.http
        self._servers = servers
        self._uploaded = meta.uploaded
        self._deadline = asyncio.get_running_loop().time() + meta.timeout_s

    async def pause(self) -> None:
        """Pause the servers, and leave those out that can't be reached."""
        if self.meta.only_stale:
            self.asked = self._servers.stale
        else:
            self.liveness.may_generate.clear()
            known = self._servers.servers
            self.asked = [server for server in known if server.is_reachable] or known
        self.members, self.found_nobody = self.asked, not self.asked
        await self._on_all(self._backend.pause, self.asked, may_be_gone=True)
        self.members = [server for server in self.asked if server not in self.failures]
        for server in self.failures:
            self.liveness.suspect(server)
        if not self.members:
            errors = "; ".join(str(error) for error in self.failures.values()) or "no server"
            raise ServerError(f"at least one inference server must be reachable: got {errors}")
        for server in [] if self.meta.only_stale else self._servers.servers:
            if server not in self.members:
                logger.warning("server %s misses weights %d and idles until the next", server.address, self.version)

    async def load_from_disk(self, servers: Sequence[Server]) -> None:
        """Let servers read the checkpoint, then remove it."""
        path = self.meta.path
        assert path is not None, "an update through the disk needs a path"
        self.is_torn = True
        checksums = self._checksums()
        await self._on_all(
            lambda one: self._count_mismatches(one, self._backend.load(one, path, self.version, checksums)), servers
        )
        await asyncio.to_thread(shutil.rmtree, path)

    async def join(self, plan: BroadcastPlan) -> None:
        """Let all servers join the group once the sender listens, as SGLang would wait for it without a deadline."""
        try:
            async with asyncio.timeout(self._remaining_s()):
                while not await _listens(plan.address, plan.port):
                    await asyncio.sleep(_LISTEN_PAUSE_S)
        except TimeoutError:
            raise TimeoutError("the sender did not listen") from None
        await self._on_all(lambda connection: self._backend.join(connection, plan, self.meta.timeout_s), plan.servers)

    async def leave(self, plan: BroadcastPlan) -> None:
        """Let the members of a group leave it; one that is gone or refuses does not matter."""
        connections = [ServerConnection(one.address, self._http, lambda: _LEAVE_S) for one in plan.servers]
        leaving = (self._backend.leave(connection, plan) for connection in connections)
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.info("a server did not leave group %s: %s", plan.name, outcome)

    async def receive_buckets(self, plan: BroadcastPlan) -> None:
        """Let all servers receive the buckets in send order; the last one carries the version."""
        must_end: dict[str, bool] = {}

        async def begin(connection: ServerConnection) -> None:
            must_end[connection.address] = await self._backend.begin(connection)

        async def end(connection: ServerConnection) -> None:
            if must_end[connection.address]:
                await self._count_mismatches(connection, self._backend.end(connection, self.version, self._checksums()))

        await self._on_all(begin, plan.servers)
        buckets = self.meta.nccl_param_specs
        self.is_torn = True
        for index, specs in enumerate(buckets):
            await self._receive_bucket(plan, specs, is_last=index == len(buckets) - 1)
        if self.meta.wants_fingerprints:
            await self.wait_for_sender()  # who knows them when everything is sent
        await self._on_all(end, plan.servers)

    async def _receive_bucket(self, plan: BroadcastPlan, specs: list[ParamSpec], *, is_last: bool) -> None:
        version = self.version if is_last else None
        await self._on_all(lambda connection: self._backend.receive(connection, plan, specs, version), plan.servers)

    def _checksums(self) -> Checksums | None:
        """Return what lets a server verify what it got."""
        return Checksums(self.meta.fingerprints, self._accepts_mismatch) if self.meta.fingerprints else None

    async def _count_mismatches(self, connection: ServerConnection, verified: Coroutine[Any, Any, list[str]]) -> None:
        """Count the tensors that the server took although they differ."""
        if differing := await verified:
            self.num_mismatched += len(differing)
            logger.warning(
                "server %s took %d tensors of version %d with other fingerprints than were sent: %s",
                *(connection.address, len(differing), self.version, ", ".join(differing[:5])),
            )

    async def wait_for_sender(self) -> None:
        """Wait until the checkpoint lies there."""
        sender = asyncio.wrap_future(self._uploaded)
        await asyncio.wait([sender], timeout=self._remaining_s())
        if not sender.done():
            raise TimeoutError("the sender did not finish")
        _raise_if_failed(sender)

    async def unless_sender_fails(self, transfer: Coroutine[Any, Any, None]) -> None:
        """Run the transfer, but end at once with the sender's error if it fails."""
        task = asyncio.create_task(transfer)
        sender = asyncio.wrap_future(self._uploaded)
        sender.add_done_callback(lambda one: one.exception())  # its failure is no news when the transfer has failed
        try:
            await asyncio.wait([task, sender], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and sender.exception() is not None:
                await asyncio.wait([task], timeout=_LAST_WORD_S)  # a server that refused says why
            if not task.done():
                _raise_if_failed(sender)
            await task
        finally:
            task.cancel()

    async def continue_all(self) -> None:
        """Let all servers generate again, and raise the first failure when all have been told."""
        timeout_s = min(_CONTINUE_S, self.meta.timeout_s)
        connections = [ServerConnection(server.address, self._http, lambda: timeout_s) for server in self.members]
        outcomes = await asyncio.gather(
            *(self._backend.resume(connection) for connection in connections), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _on_all(
        self,
        call: Callable[[ServerConnection], Coroutine[Any, Any, object]],
        servers: Sequence[Server],
        *,
        may_be_gone: bool = False,
    ) -> None:
        """Call something for all servers at once; failures are noted, and the first that matters ends the others."""

        async def call_one(server: Server) -> None:
            try:
                await call(ServerConnection(server.address, self._http, self._remaining_s))
            except ServerError as error:
                self.failures[server] = error
                if not (may_be_gone and isinstance(error, UnreachableError)):
                    raise

        tasks = [asyncio.create_task(call_one(server)) for server in servers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - asyncio.get_running_loop().time())


async def _listens(address: str, port: int) -> bool:
    """Tell whether someone accepts connections."""
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


def _raise_if_failed(sender: asyncio.Future[None]) -> None:
    """Raise the sender's error, in a wrapper, as it may be one that would end the event loop."""
    error = sender.exception()
    if error is not None:
        raise RuntimeError(f"the sender failed with {type(error).__name__}: {error}") from error


def _is_local(address: str) -> bool:
    return address.rpartition(":")[0] in ("localhost", LOOPBACK)

"""The receiving half of a weight update.

Servers pause, receive the weights through a broadcast group or from a checkpoint folder, verify them, and resume.
Invariants: an update ends within its deadline; after it a server serves the new weights, or its old ones if it keeps
them, or it has no version and gets no requests. One rule for failures: a server that fails in an update backs off.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from arealite.api.cli_args import WeightCheckConfig
from arealite.api.errors import ServerError, UnreachableError, WeightUpdateError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.inference.backends.base import Backend, BroadcastPlan, Checksums
from arealite.inference.health import Liveness
from arealite.inference.http import ServerConnection, StatusError, deadline_in
from arealite.inference.pool import NO_VERSION, Server, ServerSet
from arealite.utils.network import LOOPBACK, hold_port, host_ip, port_of

logger = logging.getLogger("arealite.client")

_RESUME_S = 30.0
"""Most that servers may take to resume after an update, whatever became of it."""
_LISTEN_PAUSE_S = 0.01
_LAST_WORD_S = 1.0
"""In which servers may say what went wrong when the sender has noticed already."""
_LEAVE_S = 5.0
"""Deadline for servers to leave a group that is no longer used."""


class WeightReceiver:
    """Brings weight updates to the servers of a set, and keeps their broadcast group from one update to the next."""

    def __init__(self, backend: Backend, servers: ServerSet, check: WeightCheckConfig) -> None:
        self.num_mismatched = 0
        """Tensors that a server kept although their checksums differed."""
        self._backend = backend
        self._servers = servers
        self._check = check
        self._plan: BroadcastPlan | None = None
        self._has_joined = False
        """Whether the servers of the plan are in its group."""
        self._port_holder: socket.socket | None = None
        """Keeps the plan's port for the sender, which listens there at its first transfer."""
        self._update: WeightUpdate | None = None
        """The last one."""
        self._is_unverified = False
        """Whether its servers hold weights that nobody has verified yet."""

    @property
    def members(self) -> list[Server]:
        """The servers that the last update reached."""
        return self._update.members if self._update else []

    @property
    def is_catch_up(self) -> bool:
        """Whether the last update was for joining servers only."""
        return self._update is not None and self._update.meta.only_joining

    # An update: begin, receive, admit

    async def begin(self, liveness: Liveness, meta: WeightUpdateMeta) -> WeightUpdate:
        """Start an update; servers of a broadcast pause now, as the sender must know how many there are."""
        meta.wants_fingerprints, meta.fingerprints = self._check.fingerprint and meta.type in self._backend.verifies, {}
        self._is_unverified = False
        update = self._update = WeightUpdate(self._backend, liveness, meta, self._servers, self._check.on_mismatch)
        if meta.type == "nccl":
            async with self._undone_on_failure(update):
                await update.pause()
                await self._agree(update)
        return update

    async def receive(self, update: WeightUpdate) -> None:
        """Bring the weights in and resume the servers; requests wait for `admit` if the update holds them."""
        meta = update.meta
        async with self._undone_on_failure(update):
            if meta.type == "disk":
                await update.wait_for_sender()
                await update.pause()
                await update.load_from_disk(update.members)
            else:
                assert self._plan is not None, "begin has made a plan"
                await update.unless_sender_fails(self._broadcast(update, self._plan))
                if meta.also_disk:
                    await update.wait_for_sender()
                    await update.load_from_disk([one for one in update.members if one not in self._plan.servers])
        self.num_mismatched += update.num_mismatched
        self._is_unverified = True
        failures = await update.resume(update.members)
        self.drop({server: str(error) for server, error in failures.items()})
        if not meta.holds_requests:
            self.admit()
            update.liveness.may_generate.set()
        if not update.members:
            raise WeightUpdateError(f"servers must resume after a weight update: got {list(failures.values())}")

    def admit(self) -> None:
        """Route requests to the updated servers, once verified or when verification is off."""
        if self._update is not None and self._is_unverified:
            self._servers.advance(self._update.members, self._update.version)
        self._is_unverified = False

    async def _agree(self, update: WeightUpdate) -> None:
        """Write the broadcast group of the update's servers into its `meta`: the last one, if all are still in it."""
        meta, servers = update.meta, tuple(one for one in update.members if one.facts.takes_broadcasts)
        meta.also_disk = len(servers) < len(update.members)
        if meta.also_disk and meta.path is None:
            unable = ", ".join(one.address for one in update.members if one not in servers)
            raise ServerError(
                f"every server must take weights by broadcast: got {unable}, which can't. Set "
                "rollout.weight_update=disk, or start vLLM by python3 -m arealite.launcher.serve.vllm_server."
            )
        has_left = any(one.version == NO_VERSION for one in servers)  # a server that started anew is in no group
        if self._plan is None or self._plan.servers != servers or has_left:
            await self._drop_plan(update)
            remote = [one.address.rpartition(":")[0] for one in servers if not _is_local(one.address)]
            address = host_ip(remote[0]) if remote else LOOPBACK
            self._port_holder = hold_port(address)
            self._plan = BroadcastPlan(
                name=f"{meta.nccl_group_name.partition('#')[0]}#{uuid.uuid4().hex[:8]}",
                address=address,
                port=port_of(self._port_holder),
                backend="nccl" if torch.cuda.is_available() and not self._backend.is_on_cpu else "gloo",
                servers=servers,
            )
        self._plan.write_to(meta)

    async def _broadcast(self, update: WeightUpdate, plan: BroadcastPlan) -> None:
        if plan.servers and not self._has_joined:
            await update.join(plan)
        self._has_joined = True
        await update.receive_buckets(plan)

    async def _drop_plan(self, update: WeightUpdate) -> None:
        """Leave the group; a sender that waits for its peers fails as they leave."""
        plan, self._plan, self._has_joined = self._plan, None, False
        if self._port_holder is not None:
            self._port_holder.close()
        if plan is not None:
            await update.leave(plan)

    # Failures

    @asynccontextmanager
    async def _undone_on_failure(self, update: WeightUpdate) -> AsyncIterator[None]:
        """Turn what goes wrong into a WeightUpdateError, after the servers have left the group and resumed."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if update.is_torn and not self._backend.keeps_old_weights:
                for server in update.members:
                    self._servers.mark_weights_lost(server, server.version)
            if isinstance(error, asyncio.CancelledError):
                self._plan = None
            else:
                await asyncio.gather(self._blame(update), self._drop_plan(update))
            # Servers that may hold a mix of old and new layers, also from an earlier update, stay paused.
            paused = [one for one in update.asked if one.is_reachable and one.version != NO_VERSION]
            for another in (await update.resume(paused)).values():
                logger.warning("a server did not resume after a failed weight update: %s", another)
            update.liveness.may_generate.set()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise WeightUpdateError(
                f"weights of version {update.version} must reach every healthy server within "
                f"{update.meta.timeout_s:g} s: got {type(error).__name__}: {error}"
            ) from error

    async def _blame(self, update: WeightUpdate) -> None:
        """Find out which servers an update failed by; they back off."""
        if update.found_nobody:
            return
        dead = await update.liveness.dead_among(update.asked)
        unreachable = {one: str(error) for one, error in update.failures.items() if isinstance(error, UnreachableError)}
        unreachable |= dict.fromkeys(dead, "it does not answer")
        if unreachable:  # what the others answered may be the consequence
            self.drop(unreachable)
        elif any(_is_mismatch(error) and one in update.serving for one, error in update.failures.items()):
            update.is_wrong = True
        else:
            self.drop({one: str(error) for one, error in update.failures.items()})

    def drop(self, failures: Mapping[Server, str]) -> None:
        """Remove servers that failed from the last update; they back off."""
        update = self._require_update()
        for server, why in failures.items():
            error = update.failures.get(server)
            refused = isinstance(error, StatusError) and error.status < 500
            if self._is_unverified:
                self._servers.mark_weights_lost(server, server.version)
            pause_s = self._servers.back_off(server, refused=refused)
            logger.warning(
                "server %s failed in a weight update and gets none for %g s: %s", server.address, pause_s, why
            )
        update.has_dropped |= bool(failures)
        update.members = [one for one in update.members if one not in failures]

    def drop_joining(self, failures: Mapping[Server, str]) -> dict[Server, str]:
        """Remove the servers with wrong weights that were only joining, if others are left; return the rest."""
        update = self._require_update()
        joining = {one: why for one, why in failures.items() if one not in update.serving}
        update.is_wrong = len(joining) < len(failures)
        if not set(self.members) - set(joining) and not self._servers.healthy:
            return dict(failures)
        self.drop(joining)
        return {one: why for one, why in failures.items() if one not in joining}

    def may_do_without(self, error: Exception) -> bool:
        """After an update that failed with this error: return whether the servers that failed explain it.

        Joining servers that could not be updated never matter to those that serve.
        """
        update = self._require_update()
        for server in update.members if self._is_unverified else []:
            self._servers.mark_weights_lost(server, server.version)
        self._is_unverified = False
        if self.is_catch_up and self._servers.healthy:
            self.drop({one: str(error) for one in update.asked if one in self._servers.joining})
            return True
        has_left = any(one not in self._servers.servers for one in update.asked)
        return not update.is_wrong and (update.has_dropped or update.found_nobody or has_left)

    def _require_update(self) -> WeightUpdate:
        assert self._update is not None, "begin comes first"
        return self._update


class WeightUpdate:
    """One update: the calls to the servers, under one deadline."""

    def __init__(
        self, backend: Backend, liveness: Liveness, meta: WeightUpdateMeta, servers: ServerSet, on_mismatch: str
    ) -> None:
        assert meta.version is not None, "the version must be known before servers are told"
        self.meta = meta
        self.version = meta.version
        self.liveness = liveness
        self.serving = set(servers.healthy)
        """Servers that served before it."""
        self.asked: list[Server] = []
        """Servers that were to take part."""
        self.members: list[Server] = []
        """Servers that take part, from `pause` on."""
        self.failures: dict[Server, ServerError] = {}
        """Why servers failed."""
        self.found_nobody = False
        """Whether no server could be paused."""
        self.is_torn = False
        """Whether a server may hold some of the new weights."""
        self.has_dropped = False
        """Whether servers were dropped from it."""
        self.is_wrong = False
        """Whether wrong weights arrived at a server that served."""
        self.num_mismatched = 0
        self._backend = backend
        self._on_mismatch = on_mismatch
        self._servers = servers
        self._uploaded = meta.uploaded
        self._deadline = deadline_in(meta.timeout_s)

    async def pause(self) -> None:
        """Pause the servers, and leave those out that can't be reached."""
        if self.meta.only_joining:
            self.asked = self._servers.joining
        else:
            self.liveness.may_generate.clear()
            reachable = [one for one in self._servers.servers if one.is_reachable]
            self.asked = self._servers.updatable or reachable or self._servers.servers
        self.members = self.asked
        await self._on_all(self._backend.pause, self.asked, may_be_gone=True)
        self.members = [server for server in self.asked if server not in self.failures]
        for server in self.failures:
            self.liveness.suspect(server)
        if not self.members:
            self.found_nobody = True
            errors = "; ".join(str(error) for error in self.failures.values()) or "no server"
            raise ServerError(f"at least one inference server must be reachable: got {errors}")
        for server in [] if self.meta.only_joining else self._servers.servers:
            if server not in self.members:
                logger.warning("server %s misses weights %d and idles until the next", server.address, self.version)
        self.failures.clear()

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
            async with asyncio.timeout_at(self._deadline):
                while not await _listens(plan.address, plan.port):
                    await asyncio.sleep(_LISTEN_PAUSE_S)
        except TimeoutError:
            raise TimeoutError("the sender did not listen") from None
        await self._on_all(lambda one: self._backend.join(one, plan, self.meta.timeout_s), plan.servers)

    async def leave(self, plan: BroadcastPlan) -> None:
        """Let the members of a group leave it; one that is gone or refuses does not matter."""
        leaving = (self._backend.leave(self._connection(one, deadline_in(_LEAVE_S)), plan) for one in plan.servers)
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.info("a server did not leave group %s: %s", plan.name, outcome)

    async def receive_buckets(self, plan: BroadcastPlan) -> None:
        """Let all servers receive the buckets in send order; the last one carries the version."""
        must_end: dict[str, bool] = {}

        async def begin(one: ServerConnection) -> None:
            must_end[one.address] = await self._backend.begin(one)

        async def end(one: ServerConnection) -> None:
            if must_end[one.address]:
                await self._count_mismatches(one, self._backend.end(one, self.version, self._checksums()))

        await self._on_all(begin, plan.servers)
        buckets = self.meta.nccl_param_specs
        self.is_torn = True  # from the first bucket on a server may hold a mix of old and new layers
        for index, specs in enumerate(buckets):
            await self._receive_bucket(plan, specs, is_last=index == len(buckets) - 1)
        if self.meta.wants_fingerprints:
            await self.wait_for_sender()  # checksums are known only when the last bucket has been sent
        await self._on_all(end, plan.servers)

    async def _receive_bucket(self, plan: BroadcastPlan, specs: list[ParamSpec], *, is_last: bool) -> None:
        version = self.version if is_last else None
        await self._on_all(lambda one: self._backend.receive(one, plan, specs, version), plan.servers)

    def _checksums(self) -> Checksums | None:
        """Return what lets a server verify what it got."""
        checksums = self.meta.fingerprints
        return Checksums(checksums, accepts_mismatch=self._on_mismatch == "warn") if checksums else None

    async def _count_mismatches(self, one: ServerConnection, verified: Coroutine[Any, Any, list[str]]) -> None:
        """Count the tensors that the server kept although they differ."""
        if differing := await verified:
            self.num_mismatched += len(differing)
            logger.warning(
                "server %s took %d tensors of version %d with other fingerprints than were sent: %s",
                *(one.address, len(differing), self.version, ", ".join(differing[:5])),
            )

    async def wait_for_sender(self) -> None:
        """Wait until the sender is done, e.g. the checkpoint is complete."""
        sender = asyncio.wrap_future(self._uploaded)
        await asyncio.wait([sender], timeout=max(0.0, self._deadline - asyncio.get_running_loop().time()))
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

    async def resume(self, servers: Sequence[Server]) -> dict[Server, BaseException]:
        """Let servers generate again; return why some did not."""
        deadline = deadline_in(min(_RESUME_S, self.meta.timeout_s))
        resuming = (self._backend.resume(self._connection(one, deadline)) for one in servers)
        outcomes = await asyncio.gather(*resuming, return_exceptions=True)
        return {
            server: outcome
            for server, outcome in zip(servers, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }

    def _connection(self, server: Server, deadline: float) -> ServerConnection:
        return ServerConnection(self.liveness.session, server.address, deadline)

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
                await call(self._connection(server, self._deadline))
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


def _is_mismatch(error: ServerError) -> bool:
    """Tell whether a server refused weights whose checksums differ, as `arealite.server` and the vLLM backend do."""
    return "with other fingerprints" in str(error)


def _is_local(address: str) -> bool:
    return address.rpartition(":")[0] in ("localhost", LOOPBACK)

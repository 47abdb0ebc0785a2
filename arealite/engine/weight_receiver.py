"""The receiving half of a publication of weights.

A publication pauses every server, brings the weights in, from a checkpoint folder or through a broadcast group, and
lets the servers go on. Requests in flight come back as aborted and the client core continues them later, unless
`rollout.pause_mode` lets them stay. Servers that can't be reached are left out, and get no requests until they take
part in a later publication. Servers that can are told the sender's fingerprints and verify what they got. Invariants:
it ends within its deadline; a failure names the server; after it servers go on, unless one of them may hold half of the
new weights: then none does until a publication has reached them whole.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal

import torch

from arealite.api.cli_args import WeightCheckConfig
from arealite.api.errors import ServerError, UnreachableError, WeightUpdateError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.engine.dialect import BroadcastPlan, Caller, Dialect, Proof
from arealite.engine.server_http import ServerHttp
from arealite.engine.server_set import NO_VERSION, Server, ServerSet
from arealite.utils.network import LOOPBACK, free_port, host_ip

logger = logging.getLogger("arealite.client")

_CONTINUE_S = 30.0
"""Most that servers may take to go on after a publication, whatever became of it."""
_LISTEN_PAUSE_S = 0.01
_LEAVE_S = 5.0
"""Deadline for servers to leave a group that is no longer used."""


class WeightReceiver:
    """Brings published weights to the members of a server set."""

    def __init__(self, dialect: Dialect, servers: ServerSet, check: WeightCheckConfig) -> None:
        self.num_mismatched = 0
        """Tensors that a server took although their fingerprints differed."""
        self._dialect = dialect
        self._servers = servers
        self._check = check
        self._plan: BroadcastPlan | None = None
        self._joined: BroadcastPlan | None = None
        self._is_torn = False
        """Whether a failed publication may have left a server with half of its weights."""

    async def begin(self, http: ServerHttp, meta: WeightUpdateMeta, may_generate: asyncio.Event) -> Publication:
        """Start a publication; servers of a broadcast are paused now, as the sender must know how many there are."""
        meta.wants_fingerprints, meta.fingerprints = self._check.fingerprint and self._dialect.verifies(meta), {}
        accepts_mismatch = self._check.on_mismatch == "warn"
        publication = Publication(
            self._dialect, http, meta, self._servers, may_generate, accepts_mismatch=accepts_mismatch
        )
        if meta.type == "nccl":
            async with self._undone_on_failure(publication):
                await publication.pause()
                self._agree(publication.members, meta)
        return publication

    async def receive(self, publication: Publication) -> None:
        """Bring the weights in."""
        async with self._undone_on_failure(publication):
            if publication.meta.type == "disk":
                await publication.wait_for_sender()
                await publication.pause()
                await publication.load_from_disk()
            else:
                assert self._plan is not None, "begin has made a plan"
                await publication.unless_sender_fails(self._broadcast(publication, self._plan))
        self._is_torn = False
        self.num_mismatched += publication.num_mismatched
        self._servers.note_publication(publication.members, publication.version)
        await self._go_on(publication, None)

    def _agree(self, members: list[Server], meta: WeightUpdateMeta) -> None:
        """Write the broadcast group of these servers into `meta`; that of the last time if they are all still in it."""
        servers = tuple(members)
        if unable := [server.address for server in servers if not server.facts.takes_broadcasts]:
            raise ServerError(
                f"every server must take weights by broadcast: got {', '.join(unable)}, which can't. Set "
                "rollout.weight_update=disk, or start vLLM by python3 -m arealite.launcher.vllm_server."
            )
        has_left = any(server.version == NO_VERSION for server in servers)  # who has started anew is in no group
        if self._plan is None or self._plan.servers != servers or has_left:
            address = LOOPBACK if all(_is_local(server.address) for server in servers) else host_ip()
            name = f"{meta.nccl_group_name.partition('#')[0]}#{uuid.uuid4().hex[:8]}"
            backend: Literal["nccl", "gloo"] = (
                "nccl" if torch.cuda.is_available() and not self._dialect.is_on_cpu else "gloo"
            )
            self._plan = BroadcastPlan(name, address, free_port(address), backend, servers)
        self._plan.write_to(meta)

    @asynccontextmanager
    async def _undone_on_failure(self, publication: Publication) -> AsyncIterator[None]:
        """Turn what goes wrong into a WeightUpdateError, after the servers went on and left the group."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            plans = {self._plan, self._joined}
            self._plan = self._joined = None
            self._is_torn |= publication.is_torn and not self._dialect.keeps_old_weights
            if not self._is_torn:
                await self._go_on(publication, error)
            if isinstance(error, asyncio.CancelledError):
                raise
            for plan in plans:
                if plan is not None:
                    await publication.leave(plan)  # a sender that waits for these peers fails now
            raise WeightUpdateError(
                f"weights of version {publication.version} must reach every live server within "
                f"{publication.meta.timeout_s:g} s: got {type(error).__name__}: {error}"
            ) from error

    async def _broadcast(self, publication: Publication, plan: BroadcastPlan) -> None:
        if self._joined is not plan:
            if self._joined is not None:
                await publication.leave(self._joined)
            self._joined = None
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
                publication.may_generate.set()


class Publication:
    """One publication: the calls to the servers, under one deadline."""

    def __init__(
        self,
        dialect: Dialect,
        http: ServerHttp,
        meta: WeightUpdateMeta,
        servers: ServerSet,
        may_generate: asyncio.Event,
        *,
        accepts_mismatch: bool,
    ) -> None:
        assert meta.version is not None, "the version must be settled before servers are told"
        self.meta = meta
        self.version = meta.version
        self.members: list[Server] = []
        """Those that take part, from `pause` on."""
        self.may_generate = may_generate
        """Cleared while they are paused."""
        self.is_torn = False
        """Whether a server may hold some of the new weights."""
        self.num_mismatched = 0
        self._dialect = dialect
        self._accepts_mismatch = accepts_mismatch
        self._http = http
        self._servers = servers
        self._uploaded = meta.uploaded
        self._deadline = asyncio.get_running_loop().time() + meta.timeout_s

    async def pause(self) -> None:
        """Pause the servers, and leave those out that can't be reached."""
        self.may_generate.clear()
        known = self._servers.servers
        self.members = [server for server in known if server.is_reachable] or known
        errors: dict[str, str] = {}

        async def pause_one(caller: Caller) -> None:
            try:
                await self._dialect.pause(caller)
            except UnreachableError as error:
                errors[caller.address] = str(error)

        await self._on_all(pause_one)
        self.members = [server for server in self.members if server.address not in errors]
        if not self.members:
            raise ServerError(f"at least one inference server must be reachable: got {'; '.join(errors.values())}")
        for server in known:
            if server not in self.members:
                logger.warning("server %s misses weights %d and idles until the next", server.address, self.version)

    async def load_from_disk(self) -> None:
        """Let all servers read the checkpoint, then remove it."""
        path = self.meta.path
        assert path is not None, "an update through the disk needs a path"
        self.is_torn = True
        proof = self._proof()
        await self._on_all(lambda one: self._count_mismatches(one, self._dialect.load(one, path, self.version, proof)))
        await asyncio.to_thread(shutil.rmtree, path)

    async def join(self, plan: BroadcastPlan) -> None:
        """Let all servers join the group once the sender listens, as SGLang would wait for it without a deadline."""
        try:
            async with asyncio.timeout(self._remaining_s()):
                while not await _listens(plan.address, plan.port):
                    await asyncio.sleep(_LISTEN_PAUSE_S)
        except TimeoutError:
            raise TimeoutError("the sender did not listen") from None
        await self._on_all(lambda caller: self._dialect.join(caller, plan, self.meta.timeout_s))

    async def leave(self, plan: BroadcastPlan) -> None:
        """Let the members of a group leave it; one that is gone or refuses does not matter."""
        callers = [Caller(one.address, self._http, lambda: _LEAVE_S) for one in plan.servers]
        leaving = (self._dialect.leave(caller, plan) for caller in callers)
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(outcome, BaseException):
                logger.info("a server did not leave group %s: %s", plan.name, outcome)

    async def receive_buckets(self, plan: BroadcastPlan) -> None:
        """Let all servers receive the buckets in send order; the last one carries the version."""
        must_end: dict[str, bool] = {}

        async def begin(caller: Caller) -> None:
            must_end[caller.address] = await self._dialect.begin(caller)

        async def end(caller: Caller) -> None:
            if must_end[caller.address]:
                await self._count_mismatches(caller, self._dialect.end(caller, self.version, self._proof()))

        await self._on_all(begin)
        buckets = self.meta.nccl_param_specs
        self.is_torn = True
        for index, specs in enumerate(buckets):
            await self._receive_bucket(plan, specs, is_last=index == len(buckets) - 1)
        if self.meta.wants_fingerprints:
            await self.wait_for_sender()  # who knows them when everything is sent
        await self._on_all(end)

    async def _receive_bucket(self, plan: BroadcastPlan, specs: list[ParamSpec], *, is_last: bool) -> None:
        version = self.version if is_last else None
        await self._on_all(lambda caller: self._dialect.receive(caller, plan, specs, version))

    def _proof(self) -> Proof | None:
        """Return what lets a server verify what it got."""
        return Proof(self.meta.fingerprints, self._accepts_mismatch) if self.meta.fingerprints else None

    async def _count_mismatches(self, caller: Caller, verified: Coroutine[Any, Any, list[str]]) -> None:
        """Count the tensors that the server took although they differ."""
        if differing := await verified:
            self.num_mismatched += len(differing)
            logger.warning(
                "server %s took %d tensors of version %d with other fingerprints than were sent: %s",
                *(caller.address, len(differing), self.version, ", ".join(differing[:5])),
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
            if not task.done():
                _raise_if_failed(sender)
            await task
        finally:
            task.cancel()

    async def continue_all(self) -> None:
        """Let all servers generate again, and raise the first failure when all have been told."""
        timeout_s = min(_CONTINUE_S, self.meta.timeout_s)
        callers = [Caller(server.address, self._http, lambda: timeout_s) for server in self.members]
        outcomes = await asyncio.gather(*(self._dialect.resume(caller) for caller in callers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _on_all(self, call: Callable[[Caller], Coroutine[Any, Any, object]]) -> None:
        """Call something for all servers at once; the first failure ends the others."""
        callers = [Caller(server.address, self._http, self._remaining_s) for server in self.members]
        tasks = [asyncio.create_task(call(caller)) for caller in callers]
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

"""The receiving half of a weight update: servers pause, receive the weights through a broadcast group or from a
checkpoint folder, verify them, and resume; those that stage weights pause only to swap them. Invariants: an update ends
within its deadline; after it a server serves the new weights, or its old ones if it stages them, or it has no version
and gets no requests; frozen weights are left out only where every server of the update got them in an earlier one, and
has had every version since. One rule for failures: a server that fails in an update is removed for a while."""

import asyncio
import contextlib
import functools
import logging
import shutil
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from arealite.api.errors import ConfigError, GroupLostError, ServerError, UnreachableError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, WeightTransfer, WeightUpdateMeta
from arealite.inference.backends.base import BroadcastPlan, MismatchError, Segment, Sent
from arealite.inference.completions import Completions
from arealite.inference.http import OutOfFilesError, ServerConnection, StatusError, deadline_in, now
from arealite.inference.pool import NO_VERSION, Server, ServerPool
from arealite.utils import trace
from arealite.utils.background import gathered, in_thread
from arealite.utils.distributed import meeting_address
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.weight_transfer import buckets_without, group_of, senders_of

logger = logging.getLogger("arealite.client")

T = TypeVar("T")
_Call = Callable[[ServerConnection], Coroutine[Any, Any, T]]

_RESUME_S = 30.0  # most that servers may take to resume after an update, whatever became of it
_LISTEN_PAUSE_S = 0.01
_LEAVE_S = 5.0  # deadline for servers to leave a group that is no longer used
_LAST_WORD_S = 1.0  # in which servers or sender may explain a failure that the other side has noticed
_FIRST_PAUSE_S, _MAX_PAUSE_S = 5.0, 600.0  # for which a server that failed in an update is removed; doubled each time


class ServersFailedError(WeightUpdateError):
    """The update failed by its servers, so it may be repeated with others."""


@dataclass(eq=False)
class WeightUpdate:
    """State of one update."""

    meta: WeightUpdateMeta
    transfer: WeightTransfer  # shared with the sender
    deadline: float
    asked: Sequence[Server] = ()  # servers that were to take part
    members: Sequence[Server] = ()  # servers that take part, once paused
    failures: dict[Server, ServerError] = field(default_factory=dict)  # errors of calls
    is_torn: bool = False  # whether a server may hold a mix of old and new layers

    @property
    def way(self) -> str:
        return "shared" if self.transfer.is_shared else self.meta.type

    async def wait_for_sender(self) -> None:
        """Wait until the sender is done, e.g. the checkpoint is complete."""
        sender = asyncio.wrap_future(self.transfer.uploaded)
        sender.add_done_callback(lambda one: one.cancelled() or one.exception())  # it may fail when nobody waits
        left_s = self.deadline - now()
        await asyncio.wait([sender], timeout=max(0.0, left_s))
        if not sender.done():
            raise TimeoutError("the sender did not finish")
        if (error := sender.exception()) is not None:  # in a wrapper, as it may be one that would end the event loop
            raise RuntimeError(f"the sender failed with {type(error).__name__}: {error}") from error

    async def has_lost_sender(self) -> bool:
        """Tell whether the sender's workers were lost, which servers may notice a moment before its master."""
        sender = asyncio.wrap_future(self.transfer.uploaded)
        await asyncio.wait([sender], timeout=_LAST_WORD_S)
        return sender.done() and isinstance(sender.exception(), GroupLostError)


class FrozenHolders:
    """The servers that hold the frozen weights of a sender."""

    def __init__(self, servers: ServerPool) -> None:
        self._servers = servers
        self._fingerprints: dict[str, str] = {}  # of the last update that brought them

    def among(self, servers: Iterable[Server], meta: WeightUpdateMeta) -> list[Server]:
        """Return the servers that need not get what is frozen in `meta`."""
        if meta.frozen is None:
            return []
        return [
            one for one in servers if one.frozen == meta.frozen.fingerprint and one.version == self._servers.version
        ]

    def note(self, update: WeightUpdate) -> None:
        """Record that an update has reached its members."""
        if not update.transfer.is_partial:
            self._fingerprints = dict(update.transfer.fingerprints)
            for server in update.members:
                server.frozen = update.meta.frozen.fingerprint if update.meta.frozen else ""

    def sent(self, transfer: WeightTransfer) -> Sent:
        """Return the weights that servers must hold, once the sender is done."""
        kept = self._fingerprints if transfer.is_partial else {}
        return Sent(kept | transfer.fingerprints, transfer.is_partial)


class WeightReceiver:
    """Brings weight updates to the servers of a run, and keeps their broadcast group from one update to the next."""

    def __init__(self, completions: Completions) -> None:
        self.num_mismatched = 0  # tensors that a server kept although their fingerprints differed
        self.num_bytes = 0  # of the tensors that were sent, to however many servers
        self._completions, self._config = completions, completions.config
        self._backend, self._servers = completions.backend, completions.servers
        self._holders = FrozenHolders(completions.servers)
        self._plan: BroadcastPlan | None = None
        self._has_joined = False  # whether the servers of the plan have joined its group
        self._port_holder: socket.socket | None = None  # keeps the plan's port until the sender listens there
        self._update: WeightUpdate  # the last one
        self._received: WeightUpdate | None = None  # that update once its members have the weights, until `admit`

    # An update: begin, receive, sample_canaries, admit, release

    async def begin(self, meta: WeightUpdateMeta) -> None:
        """Start an update by choosing its servers; those that stage no weights pause, but for the disk."""
        self._completions.update_timeout_s = meta.timeout_s
        self._received = None
        update = self._update = WeightUpdate(meta, meta.transfer, deadline_in(meta.timeout_s))
        transfer = update.transfer
        transfer.wants_fingerprints = self._config.weight_check.fingerprint and update.way in self._backend.verifies
        if update.way == "disk":
            transfer.is_partial = self._may_be_partial(self._servers.updatable)
        else:
            async with self._undone_on_failure():
                await self._gather()
                if update.way == "nccl":
                    await self._agree()

    async def receive(self) -> None:
        """Bring the weights in and resume the servers; requests wait for `admit` if the update holds them."""
        update = self._update
        async with self._undone_on_failure():
            if update.way == "disk":
                await self._update.wait_for_sender()
                await self._gather()
                await self._load_from_disk()
            elif update.way == "shared":
                await self._update.wait_for_sender()  # which hands its tensors to the server itself
            else:
                assert self._plan is not None, "begin has made a plan"
                await self._unless_sender_fails(self._broadcast(self._plan))
            if self._stages:
                await self._hold()
                await trace.awaited("servers pause", self._reach(self._backend.pause, update.members))
                await self._on_all(self._backend.swap, update.members)
        self._received = update
        failures = await trace.awaited("servers resume", self._resume(update.members))
        await self.remove(failures)
        if not update.meta.holds_requests:
            await self.release()
        if not update.members:
            raise ServersFailedError(f"servers must resume after a weight update: got {list(failures.values())}")

    async def sample_canaries(self, req: ModelRequest) -> dict[Server, Segment]:
        """Let every updated server complete `req`, whatever pauses episodes; one that fails is removed."""
        sampling = [self._completions.sample_canary(server, req) for server in self._update.members]
        outcomes = dict(zip(self._update.members, await asyncio.gather(*sampling), strict=True))
        await self.remove({server: one for server, one in outcomes.items() if isinstance(one, ServerError)})
        canaries = {server: one for server, one in outcomes.items() if isinstance(one, Segment)}
        if not canaries:
            why = "; ".join(f"{server.address}: {one}" for server, one in outcomes.items())
            raise ServersFailedError(f"servers must sample from their new weights: got {why}. Look at their logs.")
        return canaries

    async def admit(self) -> None:
        """Route requests to the updated servers, once verified or when verification is off."""
        if (update := self._received) is not None:
            self._received = None
            self._servers.advance(update.members, update.transfer.version)
            self._holders.note(update)

    async def release(self) -> None:
        """Route requests to the updated servers, also those that the update held."""
        await self.admit()
        await self._completions.release()

    @property
    def _stages(self) -> bool:
        """Whether servers generate with their old weights until they swap; of shared ones there are no old ones."""
        return self._backend.stages and self._update.way != "shared"

    async def _hold(self) -> None:
        """Let requests wait, unless they go to servers that the update leaves alone."""
        if not self._update.meta.only_joining:
            await self._completions.hold()

    async def _gather(self) -> None:
        """Choose the servers that take part. They pause, but for those that generate until they swap."""
        update = self._update
        update.asked = self._servers.updatable or self._servers.servers
        if update.meta.only_joining:
            update.asked = self._servers.joining
        if update.transfer.is_partial:  # from disk: a server that joined meanwhile gets all weights afterwards
            update.asked = self._holders.among(update.asked, update.meta)
        if self._stages:
            await self._reach(self._backend.resume, update.asked)
        else:
            await self._hold()
            await trace.awaited("servers pause", self._reach(self._backend.pause, update.asked))

    async def _reach(self, call: _Call[None], servers: Sequence[Server]) -> None:
        """Call something for servers, and leave those out of the update that can't be reached."""
        update = self._update
        await self._on_all(call, servers, may_be_gone=True)
        update.members = [server for server in servers if server not in update.failures]
        for server in update.failures:
            self._completions.health.suspect(server)
        if not update.members:
            errors = "; ".join(str(error) for error in update.failures.values()) or "no server"
            raise UnreachableError(f"at least one inference server must be reachable: got {errors}")
        for server in [] if update.meta.only_joining else self._servers.servers:
            if server not in update.members:
                logger.warning(
                    "server %s misses weights %d and idles until the next", server.address, update.transfer.version
                )
        update.failures.clear()

    async def _resume(self, servers: Sequence[Server]) -> dict[Server, BaseException]:
        """Let servers generate again; return why some did not."""
        return await self._try_on_all(self._backend.resume, servers, min(_RESUME_S, self._update.meta.timeout_s))

    # Through the disk

    async def _load_from_disk(self) -> None:
        """Let servers read the checkpoint, then remove it."""
        path, version = self._update.meta.path, self._update.transfer.version
        assert path is not None, "an update through the disk needs a path"
        self._update.is_torn = True
        self.num_bytes += await in_thread(lambda: sum(one.stat().st_size for one in Path(path).glob("*.safetensors")))
        sent = self._holders.sent(self._update.transfer)
        await self._verify(lambda one: self._backend.reload(one, path, version, sent), self._update.members)
        try:
            await in_thread(shutil.rmtree, path)
        except OSError as error:  # e.g. NFS keeps files that a server has open; all servers have the weights
            logger.warning("the checkpoint of weights %d stays in %s: %s", version, path, error)

    # By broadcast

    async def _agree(self) -> None:
        """Tell the sender the broadcast group of the update's servers: the last one, if all are still in it."""
        meta, transfer, members = self._update.meta, self._update.transfer, self._update.members
        servers = tuple(members)
        if unable := ", ".join(one.address for one in servers if not one.facts.takes_broadcasts):
            raise ConfigError(
                f"every server must take weights by broadcast: got {unable}, which can't. Set "
                "rollout.weight_update=disk, or start vLLM by python3 -m arealite.launcher.serve.vllm_server."
            )
        transfer.is_partial = self._may_be_partial(members)
        plan, senders = self._plan, senders_of(meta.nccl_param_specs)
        are_in_it = plan is not None and meta.sender_group in (None, plan.name) and [*plan.groups] == senders
        if plan is None or plan.servers != servers or not are_in_it or any(one.group != plan.name for one in servers):
            await self._drop_plan()
            hosts = [one.address.rpartition(":")[0] for one in servers]
            toward = next((host for host in hosts if host not in ("localhost", LOOPBACK)), LOOPBACK)
            if meta.meeting_point is None:
                address, self._port_holder = meeting_address(toward), hold_port()
                port, has_gpu = port_of(self._port_holder), torch.cuda.is_available()
            else:
                address, port, has_gpu = await in_thread(meta.meeting_point, toward)
            name = f"{meta.nccl_group_name}#{uuid.uuid4().hex[:8]}"
            plan = self._plan = BroadcastPlan(
                name=name,
                groups={sender: group_of(name, sender) for sender in senders},
                address=address,
                port=port,
                backend="nccl" if has_gpu and not self._backend.is_on_cpu else "gloo",
                servers=servers,
            )
        transfer.group_name, transfer.backend, transfer.world_size = plan.name, plan.backend, plan.world_size
        transfer.meeting_point = plan.address, plan.port

    def _may_be_partial(self, servers: Sequence[Server]) -> bool:
        """Tell whether these servers hold what the update may leave out, and their kind lets it."""
        holders = self._holders.among(servers, self._update.meta)
        return self._update.way in self._backend.takes_partial and len(holders) == len(servers) > 0

    async def _drop_plan(self) -> None:
        """Leave the groups; a sender that waits for its peers fails as they leave."""
        plan, self._plan, self._has_joined = self._plan, None, False
        if self._port_holder is not None:
            self._port_holder.close()
        if plan is not None:  # a server that is gone or refuses does not matter
            groups, members = [*plan.groups.values()], [one for one in plan.servers if one.state != "removed"]
            failures = await self._try_on_all(lambda one: self._backend.leave(one, groups), members, _LEAVE_S)
            for error in failures.values():
                logger.info("a server did not leave group %s: %s", plan.name, error)

    async def _broadcast(self, plan: BroadcastPlan) -> None:
        """Let the servers join the groups and receive the buckets in send order."""
        update = self._update
        if not self._has_joined:
            await self._join(plan)
        self._has_joined = True
        await self._on_all(self._backend.begin, plan.servers)
        update.is_torn = True
        frozen = update.meta.frozen.names if update.transfer.is_partial and update.meta.frozen else ()
        buckets = [plan.bucket_of(specs) for specs in buckets_without(update.meta.nccl_param_specs, frozen)]
        receive = functools.partial(self._backend.receive, buckets=buckets, version=update.transfer.version)
        await self._on_all(receive, plan.servers)
        self.num_bytes += sum(one.size for bucket in buckets for specs in bucket.values() for one in specs)
        if update.transfer.wants_fingerprints:
            await self._update.wait_for_sender()  # fingerprints are known only when the last bucket has been sent
        sent = self._holders.sent(update.transfer)
        await self._verify(lambda one: self._backend.end(one, update.transfer.version, sent), plan.servers)

    async def _join(self, plan: BroadcastPlan) -> None:
        """Let all servers join the groups once rank 0 listens, as SGLang would wait for it without a deadline."""
        why: object = "no answer"
        try:
            async with asyncio.timeout_at(self._update.deadline):
                while True:
                    try:
                        _, writer = await asyncio.open_connection(plan.address, plan.port)
                        writer.close()
                        break
                    except OSError as error:
                        why = error
                    await asyncio.sleep(_LISTEN_PAUSE_S)
        except TimeoutError:
            raise TimeoutError(f"the sender did not listen: {why}") from None

        async def join(group: str, server: ServerConnection) -> None:
            await self._backend.join(server, plan.place_of(server.address, group), self._update.meta.timeout_s)

        for group in plan.groups.values():  # they are counted together, so all servers join one before the next
            await self._on_all(functools.partial(join, group), plan.servers)
        for one in plan.servers:
            one.group = plan.name

    async def _unless_sender_fails(self, transfer: Coroutine[Any, Any, None]) -> None:
        """Run the transfer, but end at once with the sender's error if it fails."""
        task = asyncio.create_task(transfer)
        sender = asyncio.wrap_future(self._update.transfer.uploaded)
        sender.add_done_callback(lambda one: one.exception())  # its failure is no news when the transfer has failed
        try:
            await asyncio.wait([task, sender], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and sender.exception() is not None:
                await asyncio.wait([task], timeout=_LAST_WORD_S)  # a server that refused says why
            if not task.done():
                await self._update.wait_for_sender()  # raises if it has failed
            await task
        finally:
            task.cancel()

    async def _verify(self, call: _Call[list[str]], servers: Sequence[Server]) -> None:
        """Let servers verify what they got, and use it; count the tensors that they kept although they differ."""
        for server, names in zip(servers, await self._on_all(call, servers), strict=True):
            if names:
                self.num_mismatched += len(names)
                logger.warning(
                    "server %s took %d tensors of version %d with other fingerprints than were sent: %s",
                    *(server.address, len(names), self._update.transfer.version, ", ".join(names[:5])),
                )

    # Failures

    @contextlib.asynccontextmanager
    async def _undone_on_failure(self) -> AsyncIterator[None]:
        """On a failure remove the servers that failed, leave the group and resume the others; raise WeightUpdateError,
        or ServersFailedError if the update may be repeated."""
        update = self._update
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            may_repeat = False
            if isinstance(error, asyncio.CancelledError):
                self._plan = None
            else:
                may_repeat, _ = await asyncio.gather(self._remove_failed(error), self._drop_plan())
            if update.is_torn and not self._backend.stages:
                for server in update.members:
                    self._servers.mark_weights_lost(server, server.version)
            # Servers that may hold such a mix, also from an earlier update, stay paused.
            paused = [one for one in update.asked if one.state != "removed" and one.version != NO_VERSION]
            for another in (await self._resume(paused)).values():
                logger.warning("a server did not resume after a failed weight update: %s", another)
            await self._completions.release()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise (ServersFailedError if may_repeat else WeightUpdateError)(
                f"weights of version {update.transfer.version} must reach every server within "
                f"{update.meta.timeout_s:g} s: got {type(error).__name__}: {error}"
            ) from error

    async def _remove_failed(self, error: Exception) -> bool:
        """Remove the servers that failed, and return whether the update may be repeated: not if wrong weights reached
        a serving server, if every server has refused the weights, or if the sender failed."""
        update, failures = self._update, dict(self._update.failures)
        if await update.has_lost_sender():  # other workers will take its place
            return True
        is_wrong = any(isinstance(why, MismatchError) and one.state == "serving" for one, why in failures.items())
        dead = [one for one in update.asked if one.state == "removed"]
        dead += await self._completions.health.dead_among(one for one in update.asked if one not in dead)
        if not (dead or is_wrong):  # else the errors of other servers may be a consequence
            await self.remove(dict.fromkeys(update.asked, error) if update.meta.only_joining else failures)
        if is_wrong or (failures and not self._servers.updatable and all(map(self._is_refusal, failures.values()))):
            return False
        return bool(dead or failures or isinstance(error, UnreachableError))

    def _is_refusal(self, error: ServerError) -> bool:
        """Whether a server would fail alike again; one that refuses a partial update may take all weights."""
        return isinstance(error, StatusError) and error.status < 500 and not self._update.transfer.is_partial

    async def remove(self, failures: Mapping[Server, object]) -> None:
        """Remove servers that failed from the update and, for a while, from the pool."""
        update = self._update
        update.members = [one for one in update.members if one not in failures]
        for server, why in failures.items():
            self._servers.mark_weights_lost(server, server.version)
            pause_s = self._completions.health.remove(server, _FIRST_PAUSE_S, _MAX_PAUSE_S)
            logger.warning(
                "server %s failed in a weight update and gets none for %g s: %s", server.address, pause_s, why
            )

    async def recover(self, meta: WeightUpdateMeta, error: Exception, began: float) -> None:
        """Wait for servers with which the update that failed with `error` can be repeated; one of joining servers is
        repeated when they have returned. Raises the error if that would not help, or if no server is there, or no try
        since the time `began` of the loop has succeeded, for `rollout.setup_timeout` seconds after the first try."""
        for server in self._received.members if self._received else []:  # their weights are unverified
            self._servers.mark_weights_lost(server, server.version)
        self._received, may_repeat = None, isinstance(error, ServersFailedError)
        if meta.only_joining and (may_repeat or self._servers.serving):
            return
        await self._completions.release()  # requests wait for a server, which has a deadline of its own
        limit_s = meta.timeout_s + self._config.setup_timeout
        if may_repeat and now() - began <= limit_s:
            logger.warning("a weight update is repeated, without the servers that failed: %s", error)
            with contextlib.suppress(TimeoutError):
                return await self._completions.wait_for_updatable()
        raise error

    # Calls to servers

    async def _call(self, call: _Call[T], server: Server, deadline: float) -> T:
        async with self._completions.health.in_flight(server, is_update=True):
            return await call(self._completions.connection(server.address, deadline))

    async def _try_on_all(
        self, call: _Call[object], servers: Sequence[Server], limit_s: float
    ) -> dict[Server, BaseException]:
        """Call something for all servers at once, whatever becomes of the others; return what went wrong."""
        calls = [self._call(call, server, deadline_in(limit_s)) for server in servers]
        outcomes = zip(servers, await asyncio.gather(*calls, return_exceptions=True), strict=True)
        return {server: outcome for server, outcome in outcomes if isinstance(outcome, BaseException)}

    async def _on_all(self, call: _Call[T], servers: Sequence[Server], *, may_be_gone: bool = False) -> list[T | None]:
        """Call something for all servers at once; failures are noted, and the first that matters ends the others."""
        update = self._update

        async def call_one(server: Server) -> T | None:
            try:
                return await self._call(call, server, update.deadline)
            except OutOfFilesError:  # which is not the server's fault
                raise
            except ServerError as error:
                update.failures[server] = error
                if not (may_be_gone and isinstance(error, UnreachableError)):
                    raise
                return None

        return await gathered(call_one(server) for server in servers)

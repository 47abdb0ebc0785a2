"""The receiving half of a publication of weights, in the dialect of SGLang 0.5 and of our embedded server.

A publication pauses every server, brings the weights in, from a checkpoint folder or through a broadcast group, and
lets the servers go on with an empty cache. Requests in flight come back as aborted and the client core continues them
later (or they stay, if the server may keep their cache). Servers that can't be reached are left out, and get no
requests until they take part in a later publication. Embedded servers are told the sender's fingerprints and verify
what they got. Invariants: it ends within its deadline; a failure names the server; servers whose weights are whole
always go on, and one that may hold half of the new weights never does.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from arealite.api.cli_args import WeightCheckConfig
from arealite.api.errors import ServerError, UnreachableError, WeightUpdateError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.engine.server_http import Json, ServerHttp, StatusError, bad_reply
from arealite.engine.server_set import NO_VERSION, Server, ServerSet
from arealite.utils.network import LOOPBACK, free_port, host_ip

logger = logging.getLogger("arealite.client")

_CONTINUE_S = 30.0
"""Most that servers may take to go on after a publication, whatever became of it."""
_LEAVE_S = 5.0
"""Deadline for servers to leave a group that is no longer used."""


@dataclass(frozen=True)
class BroadcastPlan:
    """The broadcast group of some servers: the sender is rank 0, each server has `tp_size` ranks after it."""

    name: str
    address: str
    port: int
    backend: Literal["nccl", "gloo"]
    servers: tuple[Server, ...]
    tp_size: int

    @property
    def world_size(self) -> int:
        return 1 + len(self.servers) * self.tp_size

    def write_to(self, meta: WeightUpdateMeta) -> None:
        """Tell the sender."""
        meta.nccl_group_name = self.name
        meta.nccl_master_address = self.address
        meta.nccl_master_port = self.port
        meta.nccl_world_size = self.world_size
        meta.nccl_backend = self.backend


class WeightReceiver:
    """Brings published weights to the members of a server set."""

    def __init__(
        self, servers: ServerSet, check: WeightCheckConfig, *, is_lite: bool, tp_size: int, keeps_kv: bool
    ) -> None:
        """`keeps_kv`: requests stay in place while servers are paused, and go on with the keys and values they have."""
        self.num_mismatched = 0
        """Tensors that a server took although their fingerprints differed."""
        self._servers = servers
        self._check = check
        self._is_lite = is_lite
        """Embedded servers are on the CPU, and keep the old weights until all new ones have come."""
        self._tp_size = tp_size
        self._pause_mode: Literal["abort", "in_place"] = "in_place" if keeps_kv else "abort"
        self._plan: BroadcastPlan | None = None
        self._joined: BroadcastPlan | None = None
        self._is_torn = False
        """Whether a failed publication may have left a server with half of its weights."""

    async def begin(self, http: ServerHttp, meta: WeightUpdateMeta, may_generate: asyncio.Event) -> Publication:
        """Start a publication; servers of a broadcast are paused now, as the sender must know how many there are."""
        meta.wants_fingerprints, meta.fingerprints = self._is_lite and self._check.fingerprint, {}
        publication = Publication(
            http,
            meta,
            self._servers,
            may_generate,
            pause_mode=self._pause_mode,
            accepts_mismatch=self._check.on_mismatch == "warn",
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
        has_left = any(server.version == NO_VERSION for server in servers)  # who has started anew is in no group
        if self._plan is None or self._plan.servers != servers or has_left:
            address = LOOPBACK if all(_is_local(server.address) for server in servers) else host_ip()
            name = f"{meta.nccl_group_name.partition('#')[0]}#{uuid.uuid4().hex[:8]}"
            backend: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() and not self._is_lite else "gloo"
            self._plan = BroadcastPlan(name, address, free_port(address), backend, servers, self._tp_size)
        self._plan.write_to(meta)

    @asynccontextmanager
    async def _undone_on_failure(self, publication: Publication) -> AsyncIterator[None]:
        """Turn what goes wrong into a WeightUpdateError, after the servers went on and left the group."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            plans = {self._plan, self._joined}
            self._plan = self._joined = None
            self._is_torn |= publication.is_torn and not self._is_lite
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
            await publication.join(plan, tells_timeout=self._is_lite)
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
        http: ServerHttp,
        meta: WeightUpdateMeta,
        servers: ServerSet,
        may_generate: asyncio.Event,
        *,
        pause_mode: Literal["abort", "in_place"],
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
        self._pause_mode = pause_mode
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

        async def pause_one(_: int, address: str) -> None:
            try:
                await self._post(address, "/pause_generation", {"mode": self._pause_mode})
            except UnreachableError as error:
                errors[address] = str(error)

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
        payload = {"model_path": path, "weight_version": str(self.version), "flush_cache": True}
        await self._on_all(
            lambda _, address: self._post_verified(address, "/update_weights_from_disk", payload | self._proof())
        )
        await asyncio.to_thread(shutil.rmtree, path)

    async def join(self, plan: BroadcastPlan, *, tells_timeout: bool) -> None:
        """Let all servers join the group, while the sender does; `timeout_s` is of our own servers' dialect."""

        def join_one(index: int, address: str) -> Coroutine[Any, Any, Json]:
            payload: Json = {
                "master_address": plan.address,
                "master_port": plan.port,
                "rank_offset": 1 + index * plan.tp_size,
                "world_size": plan.world_size,
                "group_name": plan.name,
                "backend": plan.backend,
            }
            if tells_timeout:
                payload["timeout_s"] = self.meta.timeout_s
            return self._post(address, "/init_weights_update_group", payload)

        await self._on_all(join_one)

    async def leave(self, plan: BroadcastPlan) -> None:
        """Let the members of a group leave it; one that is gone or refuses does not matter."""
        payload = {"group_name": plan.name}
        outcomes = await asyncio.gather(
            *(
                self._http.post(one.address, "/destroy_weights_update_group", payload, timeout_s=_LEAVE_S)
                for one in plan.servers
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                logger.info("a server did not leave group %s: %s", plan.name, outcome)

    async def receive_buckets(self, plan: BroadcastPlan) -> None:
        """Let all servers receive the buckets in send order; the last one carries the version."""
        has_sessions: dict[str, bool] = {}

        async def begin(_: int, address: str) -> None:
            has_sessions[address] = await self._post_if_known(address, "/begin_weight_update", {})

        async def end(_: int, address: str) -> None:
            if has_sessions[address]:
                await self._post_verified(address, "/end_weight_update", self._proof())

        await self._on_all(begin)
        buckets = self.meta.nccl_param_specs
        self.is_torn = True
        for index, specs in enumerate(buckets):
            is_last = index == len(buckets) - 1
            await self._post_all("/update_weights_from_distributed", self._bucket_payload(plan, specs, is_last=is_last))
        if self.meta.wants_fingerprints:
            await self.wait_for_sender()  # who knows them when everything is sent
        await self._on_all(end)

    def _proof(self) -> Json:
        """Return the fields of our own dialect that let a server verify what it got."""
        if not self.meta.fingerprints:
            return {}
        on_mismatch = "accept" if self._accepts_mismatch else "refuse"
        return {"fingerprints": self.meta.fingerprints, "on_mismatch": on_mismatch}

    async def _post_verified(self, address: str, endpoint: str, payload: Json) -> None:
        """Post, and count the tensors that the server took although they differ."""
        reply = await self._post(address, endpoint, payload)
        if differing := reply.get("mismatched"):
            self.num_mismatched += len(differing)
            logger.warning(
                "server %s took %d tensors of version %d with other fingerprints than were sent: %s",
                *(address, len(differing), self.version, ", ".join(differing[:5])),
            )

    def _bucket_payload(self, plan: BroadcastPlan, specs: list[ParamSpec], *, is_last: bool) -> Json:
        return {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": plan.name,
            "flush_cache": is_last,
            "weight_version": str(self.version) if is_last else None,
        }

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
        outcomes = await asyncio.gather(
            *(
                self._http.post(server.address, "/continue_generation", {}, timeout_s=timeout_s)
                for server in self.members
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _post_all(self, endpoint: str, payload: Json) -> None:
        """Post the same to all servers at once."""
        await self._on_all(lambda _, address: self._post(address, endpoint, payload))

    async def _on_all(self, call: Callable[[int, str], Coroutine[Any, Any, object]]) -> None:
        """Call something for all servers at once; the first failure ends the others."""
        tasks = [asyncio.create_task(call(index, server.address)) for index, server in enumerate(self.members)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _post(self, address: str, endpoint: str, payload: Json) -> Json:
        reply = await self._http.post(address, endpoint, payload, timeout_s=self._remaining_s())
        if reply.get("success") is False:
            raise bad_reply(address, endpoint, "report success", reply)
        return reply

    async def _post_if_known(self, address: str, endpoint: str, payload: Json) -> bool:
        """Post, and tell whether the server has the endpoint."""
        try:
            await self._post(address, endpoint, payload)
        except StatusError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - asyncio.get_running_loop().time())


def _raise_if_failed(sender: asyncio.Future[None]) -> None:
    """Raise the sender's error, in a wrapper, as it may be one that would end the event loop."""
    error = sender.exception()
    if error is not None:
        raise RuntimeError(f"the sender failed with {type(error).__name__}: {error}") from error


def _is_local(address: str) -> bool:
    return address.rpartition(":")[0] in ("localhost", LOOPBACK)

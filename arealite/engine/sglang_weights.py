"""The receiving half of a publication of weights, in the dialect of SGLang 0.5 and of our embedded server.

A publication pauses every server (requests in flight come back as aborted and the client core continues them later),
brings the weights in, from a checkpoint folder or through a broadcast group, and lets the servers go on. Invariants: it
ends within its deadline; a failure names the server; servers whose weights are whole always go on, and one that may
hold half of the new weights never does.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import torch

from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.engine.server_http import Json, ServerHttp, StatusError, bad_reply
from arealite.engine.server_set import Server, ServerSet
from arealite.utils.network import LOOPBACK, free_port, host_ip

logger = logging.getLogger("arealite.client")

_CONTINUE_S = 30.0
"""Deadline for letting servers go on after a publication, whatever became of it."""
_LEAVE_S = 5.0
"""Deadline for servers to leave a group that is no longer used."""


@dataclass(frozen=True)
class BroadcastPlan:
    """The broadcast group of the servers of one membership epoch: the sender is rank 0, servers are 1 and up."""

    epoch: int
    name: str
    address: str
    port: int
    backend: Literal["nccl", "gloo"]
    servers: tuple[Server, ...]

    def write_to(self, meta: WeightUpdateMeta) -> None:
        """Tell the sender."""
        meta.nccl_group_name = self.name
        meta.nccl_master_address = self.address
        meta.nccl_master_port = self.port
        meta.nccl_world_size = 1 + len(self.servers)
        meta.nccl_backend = self.backend


class WeightReceiver:
    """Brings published weights to the members of a server set."""

    def __init__(self, servers: ServerSet, *, is_lite: bool) -> None:
        self._servers = servers
        self._is_lite = is_lite
        """Embedded servers are on the CPU, and keep the old weights until all new ones have come."""
        self._plan: BroadcastPlan | None = None
        self._joined: BroadcastPlan | None = None

    def agree(self, meta: WeightUpdateMeta) -> BroadcastPlan:
        """Write the broadcast group of the current members into `meta`; an existing one is used again."""
        epoch = self._servers.epoch
        if self._plan is None or self._plan.epoch != epoch:
            servers = tuple(self._servers.servers)
            address = LOOPBACK if all(_is_local(server.address) for server in servers) else host_ip()
            name = f"{meta.nccl_group_name}-{epoch}"
            backend: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() and not self._is_lite else "gloo"
            self._plan = BroadcastPlan(epoch, name, address, free_port(address), backend, servers)
        self._plan.write_to(meta)
        return self._plan

    async def receive(
        self, http: ServerHttp, meta: WeightUpdateMeta, plan: BroadcastPlan | None, may_generate: asyncio.Event
    ) -> None:
        """Bring the weights in, by broadcast if there is a plan; `may_generate` is cleared meanwhile."""
        members = list(plan.servers) if plan is not None else self._servers.servers
        publication = _Publication(http, meta, members)
        try:
            if plan is None:
                await publication.wait_for_sender()
            may_generate.clear()
            await publication.post_all("/pause_generation", {"mode": "abort"})
            if plan is None:
                await publication.load_from_disk()
            else:
                await publication.unless_sender_fails(self._broadcast(publication, plan))
        except (Exception, asyncio.CancelledError) as error:
            self._plan = self._joined = None
            self._servers.renew()
            if self._is_lite or not publication.is_torn:
                await self._go_on(publication, may_generate, error)
            if isinstance(error, asyncio.CancelledError):
                raise
            if plan is not None:
                await publication.leave(plan)  # a sender that waits for these peers fails now
            raise WeightUpdateError(
                f"weights of version {meta.version} must reach every server within {meta.timeout_s:g} s: got "
                f"{type(error).__name__}: {error}"
            ) from error
        for server in members:
            server.version = publication.version
        await self._go_on(publication, may_generate, None)

    async def _broadcast(self, publication: _Publication, plan: BroadcastPlan) -> None:
        if self._joined is not plan:
            if self._joined is not None:
                await publication.leave(self._joined)
            self._joined = None
            await publication.join(plan)
            self._joined = plan
        await publication.receive_buckets(plan)

    async def _go_on(
        self, publication: _Publication, may_generate: asyncio.Event, failure: BaseException | None
    ) -> None:
        """Let the servers generate again; after a failure, another one is only logged."""
        try:
            await publication.continue_all()
        except ServerError as error:
            if failure is None:
                raise WeightUpdateError(f"every server must go on after an update of its weights: {error}") from error
            logger.warning("a server did not go on after a failed update of its weights: %s", error)
        finally:
            may_generate.set()


class _Publication:
    """One publication: the calls to the servers, under one deadline."""

    def __init__(self, http: ServerHttp, meta: WeightUpdateMeta, servers: list[Server]) -> None:
        assert meta.version is not None, "the version must be settled before servers are told"
        self.version = meta.version
        self.is_torn = False
        """Whether a server may hold some of the new weights."""
        self._http = http
        self._meta = meta
        self._servers = servers
        self._deadline = asyncio.get_running_loop().time() + meta.timeout_s

    async def post_all(self, endpoint: str, payload: Json) -> None:
        """Post the same to all servers at once."""
        await self._on_all(lambda _, address: self._post(address, endpoint, payload))

    async def load_from_disk(self) -> None:
        """Let all servers read the checkpoint, then remove it."""
        path = self._meta.path
        assert path is not None, "an update through the disk needs a path"
        await self.post_all("/update_weights_from_disk", {"model_path": path, "weight_version": str(self.version)})
        await asyncio.to_thread(shutil.rmtree, path)

    async def join(self, plan: BroadcastPlan) -> None:
        """Let all servers join the group, while the sender does."""

        def join_one(index: int, address: str) -> Coroutine[Any, Any, None]:
            payload = {
                "master_address": plan.address,
                "master_port": plan.port,
                "rank_offset": 1 + index,
                "world_size": 1 + len(plan.servers),
                "group_name": plan.name,
                "backend": plan.backend,
            }
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
                await self._post(address, "/end_weight_update", {})

        await self._on_all(begin)
        buckets = self._meta.nccl_param_specs
        self.is_torn = True
        for index, specs in enumerate(buckets):
            is_last = index == len(buckets) - 1
            await self.post_all("/update_weights_from_distributed", self._bucket_payload(plan, specs, is_last=is_last))
        await self._on_all(end)

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
        sender = asyncio.wrap_future(self._meta.uploaded)
        await asyncio.wait([sender], timeout=self._remaining_s())
        if not sender.done():
            raise TimeoutError("the sender did not finish")
        _raise_if_failed(sender)

    async def unless_sender_fails(self, transfer: Coroutine[Any, Any, None]) -> None:
        """Run the transfer, but end at once with the sender's error if it fails."""
        task = asyncio.create_task(transfer)
        sender = asyncio.wrap_future(self._meta.uploaded)
        try:
            await asyncio.wait([task, sender], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _raise_if_failed(sender)
            await task
        finally:
            task.cancel()

    async def continue_all(self) -> None:
        """Let all servers generate again, and raise the first failure when all have been told."""
        outcomes = await asyncio.gather(
            *(
                self._http.post(server.address, "/continue_generation", {}, timeout_s=_CONTINUE_S)
                for server in self._servers
            ),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _on_all(self, call: Callable[[int, str], Coroutine[Any, Any, None]]) -> None:
        """Call something for all servers at once; the first failure ends the others."""
        tasks = [asyncio.create_task(call(index, server.address)) for index, server in enumerate(self._servers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _post(self, address: str, endpoint: str, payload: Json) -> None:
        reply = await self._http.post(address, endpoint, payload, timeout_s=self._remaining_s())
        if reply.get("success") is False:
            raise bad_reply(address, endpoint, "report success", reply)

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

"""Receives new weights for the engine, all of them or none.

Tensors are staged while generation goes on and handed over in one piece at the end, so a sender that dies half-way
leaves the old weights in place, and so do tensors that are not what the sender says they are. After a failed transfer
the group is closed, which is what tells the sender.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import check_shapes, read_checkpoint
from arealite.server.protocol import (
    BadRequestError,
    BucketBody,
    DiskUpdateBody,
    EndUpdateBody,
    JoinGroupBody,
    ProofBody,
)
from arealite.utils.fingerprint import mismatched
from arealite.utils.weight_transfer import BroadcastGroup, close_group, join_group, receive_bucket

T = TypeVar("T")


class WeightReceiver:
    """The receiving half of weight publication. One request at a time changes its state."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._groups: dict[str, BroadcastGroup] = {}
        self._staged: dict[str, torch.Tensor] | None = None
        """None outside begin/end."""
        self._version: str | None = None
        self._turn = asyncio.Lock()

    async def load_from_disk(self, body: DiskUpdateBody) -> list[str]:
        """Load a checkpoint folder and return the names of tensors that are not what the sender says."""
        async with self._turn:
            try:
                weights = await in_thread(lambda: read_checkpoint(body.model_path))
                differing = await _verify(weights, body)
                if body.abort_all_requests:
                    await asyncio.wrap_future(self._engine.abort())
                await asyncio.wrap_future(self._engine.update_weights(weights, body.weight_version))
            except (ValueError, OSError) as error:
                raise BadRequestError(str(error)) from error
            return differing

    async def join(self, body: JoinGroupBody) -> None:
        """Join the sender's broadcast group as rank `rank_offset`."""
        async with self._turn:
            if body.group_name in self._groups:
                raise BadRequestError(f"group_name must be new: got {body.group_name}. Destroy that group first.")
            try:
                self._groups[body.group_name] = await in_thread(
                    lambda: join_group(
                        body.master_address,
                        body.master_port,
                        body.rank_offset,
                        body.world_size,
                        body.group_name,
                        backend=body.backend,
                        timeout_s=body.timeout_s,
                    )
                )
            except (ValueError, ConnectionError) as error:
                raise BadRequestError(str(error)) from error

    async def leave(self, group_name: str) -> None:
        """Leave a group; a transfer in progress is waited for."""
        async with self._turn:
            self._close(group_name)

    async def begin(self) -> None:
        """Start an update; what an unfinished one staged is dropped."""
        async with self._turn:
            self._staged, self._version = {}, None

    async def stage(self, body: BucketBody) -> None:
        """Receive one bucket."""
        async with self._turn:
            group = self._groups.get(body.group_name)
            if group is None:
                raise BadRequestError(f"group_name must be a group we joined: got {body.group_name}. Join it first.")
            try:
                if self._staged is None:
                    raise BadRequestError("/begin_weight_update must come first: got a bucket outside of an update.")
                check_shapes({spec.name: spec.shape for spec in body.specs}, self._engine.weight_shapes)
                self._staged.update(await in_thread(lambda: receive_bucket(group, body.specs)))
            except BaseException as error:  # whatever happened, a cancellation included, the sender must not go on
                self._staged = None
                self._close(body.group_name)
                if isinstance(error, ValueError | ConnectionError):
                    raise BadRequestError(str(error)) from error
                raise
            self._version = body.weight_version or self._version

    async def end(self, body: EndUpdateBody) -> list[str]:
        """Swap the staged weights in and return the names of tensors that are not what the sender says."""
        async with self._turn:
            staged, self._staged = self._staged, None
            if staged is None:
                raise BadRequestError("/begin_weight_update must come first: got the end of no update.")
            differing = await _verify(staged, body)
            try:
                await asyncio.wrap_future(self._engine.update_weights(staged, self._version))
            except ValueError as error:
                raise BadRequestError(str(error)) from error
            return differing

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self._close(name)

    def _close(self, group_name: str) -> None:
        group = self._groups.pop(group_name, None)
        if group is not None:
            close_group(group)


async def _verify(weights: dict[str, torch.Tensor], proof: ProofBody) -> list[str]:
    """Name the tensors that are not what the sender says; raise BadRequestError if it wants those refused."""
    told = proof.fingerprints
    if told is None:
        return []
    differing = await in_thread(lambda: mismatched(weights, told))
    if differing and proof.on_mismatch == "refuse":
        raise BadRequestError(
            f"tensors must arrive as they were sent: got {len(differing)} of {len(told)} with other fingerprints, "
            f"{', '.join(differing[:5])}. The old weights stay; send them again."
        )
    return differing


async def in_thread(function: Callable[[], T]) -> T:
    """Run what blocks in a thread of its own, one that does not keep the process from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            outcome = function()
        except BaseException as error:  # belongs to whoever awaits
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(outcome)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.wrap_future(future)

"""Receives new weights for the engine, all or none: tensors are staged and swapped in at the end, so the old weights
survive a sender that dies half-way and tensors whose fingerprints differ. A failed transfer closes the group, which
fails the sender too. Fingerprints cover all weights, also those of an earlier update that a partial update keeps.
ValueError and OSError are replies of status 400."""

import asyncio

import torch

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import check_shapes, read_checkpoint
from arealite.server import protocol
from arealite.utils.background import in_thread
from arealite.utils.fingerprint import differing, fingerprints
from arealite.utils.weight_transfer import BroadcastGroup, close_group, join_group, receive_bucket


class MismatchError(ValueError):
    """Tensors did not arrive as they were sent."""


class WeightReceiver:
    """The server's half of a weight update. One request at a time changes its state; groups form beside them."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._groups: dict[str, BroadcastGroup | None] = {}  # None while it forms
        self._staged: dict[str, torch.Tensor] | None = None  # None outside begin/end
        self._version: str | None = None
        self._is_partial = False  # whether weights that are not staged keep their values
        self._next_fingerprints: dict[str, str] = {}  # of the engine's weights after this update, if it is verified
        self._fingerprints: dict[str, str] | None = None  # of the engine's weights; None before the first update
        self._lock = asyncio.Lock()

    async def load_from_disk(self, body: protocol.DiskUpdateBody) -> list[str]:
        """Load a checkpoint folder; return the tensors whose fingerprints differ from the sender's."""
        async with self._lock:
            self._staged, self._version = await in_thread(read_checkpoint, body.model_path), body.weight_version
            self._is_partial, self._next_fingerprints = False, {}
            return await self._finish(body, aborts=body.abort_all_requests)

    async def join(self, body: protocol.JoinGroupBody) -> None:
        """Join the sender's broadcast group as rank `rank_offset`. Other requests do not wait until it forms."""
        name = body.group_name
        if name in self._groups:
            raise ValueError(f"group_name must be new: got {name}. Destroy that group first.")
        self._groups[name] = None
        place = body.master_address, body.master_port, body.rank_offset, body.world_size, name
        try:
            group = await in_thread(lambda: join_group(*place, backend=body.backend, timeout_s=body.timeout_s))
        finally:
            is_wanted = name in self._groups
            self._groups.pop(name, None)
        if not is_wanted:
            close_group(group)
            raise ValueError(f"a group must not be destroyed before it has formed: got {name}. Join a new one.")
        self._groups[name] = group

    async def leave(self, body: protocol.LeaveGroupBody) -> None:
        """Leave a group, after a transfer in progress."""
        async with self._lock:
            self._close(body.group_name)

    async def begin(self, _: protocol.BeginUpdateBody) -> None:
        """Start an update, dropping an unfinished one."""
        async with self._lock:
            self._staged, self._version = {}, None
            self._is_partial, self._next_fingerprints = False, {}

    async def stage(self, body: protocol.BucketBody) -> None:
        """Receive one bucket."""
        async with self._lock:
            groups: list[BroadcastGroup] = []
            for name in body.groups:
                if (group := self._groups.get(name)) is None:
                    raise ValueError(f"group_name must be a group we joined: got {name}. Join it first.")
                groups.append(group)
            try:
                if self._staged is None:
                    raise ValueError("/begin_weight_update must come first: got a bucket outside of an update.")
                check_shapes({spec.name: spec.shape for spec in body.specs}, self._engine.weight_shapes)
                self._staged.update(await in_thread(receive_bucket, groups, body.specs))
            except BaseException:  # also a cancellation must stop the senders
                self._staged = None
                for name in body.groups:
                    self._close(name)
                raise
            self._version = body.weight_version or self._version

    async def end(self, body: protocol.VerifiedBody) -> list[str]:
        """Swap the staged weights in; return the tensors whose fingerprints differ from the sender's."""
        async with self._lock:
            return await self._finish(body)

    async def _finish(self, body: protocol.VerifiedBody, *, aborts: bool = False) -> list[str]:
        """Verify the staged tensors; hand them to the engine unless the body says `only_stage`."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise ValueError("/begin_weight_update must come first: got the end of no update.")
        wrong = await self._verify(staged, body)
        if body.only_stage:
            self._staged = staged
            return wrong
        if aborts:
            await asyncio.wrap_future(self._engine.abort())
        update = self._engine.update_weights(staged, self._version, is_partial=self._is_partial)
        await asyncio.wrap_future(update)
        self._fingerprints = self._next_fingerprints
        return wrong

    async def _verify(self, staged: dict[str, torch.Tensor], body: protocol.VerifiedBody) -> list[str]:
        """Return the tensors whose fingerprints differ; ValueError if the sender wants those refused, or if a partial
        update is the first one."""
        if body.is_partial:
            if self._fingerprints is None:
                raise ValueError(
                    "a partial update must follow a whole one: got none since this server started. Send every tensor."
                )
            self._is_partial = True
        if body.fingerprints is None:
            return []
        kept = (self._fingerprints or {}) if self._is_partial else {}
        self._next_fingerprints = kept | await in_thread(fingerprints, staged)
        wrong = differing(self._next_fingerprints, body.fingerprints)
        if wrong and body.on_mismatch == "refuse":
            raise MismatchError(
                f"tensors must arrive as they were sent: got {len(wrong)} of {len(body.fingerprints)} with other "
                f"fingerprints, {', '.join(wrong[:5])}. The old weights stay; send them again."
            )
        return wrong

    async def leave_all(self, _: object) -> None:
        """Leave all groups, as the application ends."""
        for name in list(self._groups):
            self._close(name)

    def _close(self, group_name: str) -> None:
        if (group := self._groups.pop(group_name, None)) is not None:
            close_group(group)

"""Receives new weights for the engine, all or none: tensors are staged and swapped in at the end, so the old weights
survive a sender that dies half-way and tensors whose fingerprints differ. A failed transfer closes the group, which
fails the sender too. Fingerprints are of all weights, also those of an earlier update that a partial one keeps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

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
        self._is_partial = False  # whether weights that are not staged stay
        self._found: dict[str, str] = {}  # fingerprints of what the engine will have; empty if nobody verifies
        self._held: dict[str, str] | None = None  # of what updates brought to the engine; None before the first
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Let other requests wait until the block ends."""
        async with self._lock:
            with _refusing():
                yield

    async def load_from_disk(self, body: protocol.DiskUpdateBody) -> list[str]:
        """Load a checkpoint folder; return the tensors whose fingerprints differ from the sender's."""
        async with self._turn():
            self._staged, self._version = await in_thread(read_checkpoint, body.model_path), body.weight_version
            self._is_partial, self._found = False, {}
            return await self._finish(body, aborts=body.abort_all_requests)

    async def join(self, body: protocol.JoinGroupBody) -> None:
        """Join the sender's broadcast group as rank `rank_offset`. Nobody waits for a group that never forms."""
        name = body.group_name
        if name in self._groups:
            raise ValueError(f"group_name must be new: got {name}. Destroy that group first.")
        self._groups[name] = None
        place = body.master_address, body.master_port, body.rank_offset, body.world_size, name
        try:
            with _refusing():
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
        async with self._turn():
            self._close(body.group_name)

    async def begin(self, _: protocol.BeginUpdateBody) -> None:
        """Start an update, dropping an unfinished one."""
        async with self._turn():
            self._staged, self._version = {}, None
            self._is_partial, self._found = False, {}

    async def stage(self, body: protocol.BucketBody) -> None:
        """Receive one bucket."""
        async with self._turn():
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
        async with self._turn():
            return await self._finish(body)

    async def _finish(self, body: protocol.VerifiedBody, *, aborts: bool = False) -> list[str]:
        """Verify what is staged, and use it unless it is only to be staged."""
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
        self._held = self._found
        return wrong

    async def _verify(self, staged: dict[str, torch.Tensor], body: protocol.VerifiedBody) -> list[str]:
        """Return the tensors whose fingerprints differ; ValueError if the sender wants those refused, or keeps weights
        that nobody has sent."""
        if body.is_partial:
            if self._held is None:
                raise ValueError(
                    "a partial update must follow a whole one: got none since this server started. Send every tensor."
                )
            self._is_partial = True
        if body.fingerprints is None:
            return []
        kept = (self._held or {}) if self._is_partial else {}
        self._found = kept | await in_thread(fingerprints, staged)
        wrong = differing(self._found, body.fingerprints)
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


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn what a client can change into a ValueError (a 400)."""
    try:
        yield
    except OSError as error:
        raise ValueError(str(error)) from error

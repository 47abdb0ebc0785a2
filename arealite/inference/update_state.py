"""What weight updates remember: the state of one, and which servers need not get again what training never changes.

Invariant: an update leaves out frozen weights only where every server that takes part got them in an earlier one, and
has had every version since. A server that joins, comes back or missed a version gets all weights.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from arealite.api.errors import GroupLostError, ServerError
from arealite.api.io_struct import ParamSpec, WeightUpdateMeta
from arealite.inference.backends.base import Sent
from arealite.inference.pool import Server, ServerPool
from arealite.utils.weight_transfer import buckets_without

LAST_WORD_S = 1.0  # in which servers and sender may say what went wrong when the other side has noticed already


@dataclass(eq=False)
class WeightUpdate:
    """State of one update."""

    meta: WeightUpdateMeta
    version: int
    deadline: float
    serving: set[Server]  # servers that served before it
    asked: Sequence[Server] = ()  # servers that were to take part
    members: Sequence[Server] = ()  # servers that take part, once paused
    failures: dict[Server, ServerError] = field(default_factory=dict)  # why servers failed
    is_torn: bool = False  # whether a server may hold some of the new weights
    has_dropped: bool = False  # whether servers were dropped from it, or none could be paused
    has_lost_sender: bool = False  # whether the sender's workers were lost, which others replace
    is_wrong: bool = False  # whether wrong weights arrived at a server that served

    async def wait_for_sender(self) -> None:
        """Wait until the sender is done, e.g. the checkpoint is complete."""
        sender = asyncio.wrap_future(self.meta.uploaded)
        sender.add_done_callback(lambda one: one.cancelled() or one.exception())  # it may fail when nobody waits
        left_s = self.deadline - asyncio.get_running_loop().time()
        await asyncio.wait([sender], timeout=max(0.0, left_s))
        if not sender.done():
            raise TimeoutError("the sender did not finish")
        if (error := sender.exception()) is not None:  # in a wrapper, as it may be one that would end the event loop
            raise RuntimeError(f"the sender failed with {type(error).__name__}: {error}") from error

    async def is_sender_lost(self) -> bool:
        """Tell whether a sender's workers were lost, which its servers may notice a moment before its master."""
        sender = asyncio.wrap_future(self.meta.uploaded)
        await asyncio.wait([sender], timeout=LAST_WORD_S)
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

    def note(self, servers: Iterable[Server], meta: WeightUpdateMeta) -> None:
        """Record that an update has reached these servers."""
        if not meta.is_partial:
            self._fingerprints = dict(meta.fingerprints)
            for server in servers:
                server.frozen = meta.frozen.fingerprint if meta.frozen else ""

    def buckets(self, meta: WeightUpdateMeta) -> list[list[ParamSpec]]:
        """Return what a broadcast sends."""
        return buckets_without(meta.nccl_param_specs, meta.frozen.names if meta.is_partial and meta.frozen else ())

    def sent(self, meta: WeightUpdateMeta) -> Sent:
        """Return what servers must hold, once the sender is done."""
        kept = self._fingerprints if meta.is_partial else {}
        return Sent(kept | meta.fingerprints, meta.is_partial)

"""Distributes rank 0's batches to all ranks.

Invariant: every rank returns its part or raises rank 0's error; a rank on which only its own callback fails raises at
once, as the other ranks learn of it by the end of its process.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.errors import EpisodeError
from arealite.utils import heartbeat, stop
from arealite.utils.distributed import is_agreed

T = TypeVar("T")
P = TypeVar("P")

# Only for a rank 0 that is frozen: its waits have deadlines of their own, and its death ends the exchange at once.
_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class _Message:
    """What every rank gets; without a field that is set, its part follows."""

    error: str | None = None
    is_callback: bool = False
    stops: bool = False


class RankZeroExchange:
    """Gives each rank its part of what rank 0 collects; ranks use it in the same order.

    It has a gloo group of its own, so it never mixes with collectives of training, whatever backend those use.
    """

    def __init__(self, parallel: str = "") -> None:
        """`parallel` has the sizes of the trainer, whose ranks of a block get the same part; empty is a part each."""
        self._parallel = parallel
        self._group: dist.ProcessGroup | None = None
        self._is_open = False  # whether the other ranks receive
        self._has_left = False  # whether rank 0 has left a callback in which the others may still be

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def _sizes(self) -> ParallelSizes:
        return ParallelSizes.from_str(self._parallel or f"d{self.num_ranks}")

    def share(
        self, collect: Callable[[], T], split: Callable[[T, int], Iterable[P]], callback: Callable[[], None] | None
    ) -> P:
        """Return this rank's part of what rank 0 collects, or raise its error on every rank.

        `split` makes a part for each block of ranks, and rank 0 sends one before it takes the next. Other ranks run the
        callback as often as rank 0 does in `collect`.
        """
        if dist.is_initialized() and dist.get_rank() != 0:
            return cast("P", self._receive(callback))
        was_open, self._is_open = self._is_open, self.num_ranks > 1  # a callback may collect
        if self._is_open:
            self._own_group()
        try:
            sizes = self._sizes
            parts = iter(split(collect(), sizes.data))
            own = next(parts)
        except BaseException as error:
            if self._is_open and not self._has_left:
                stops = isinstance(error, stop.RunStopped)
                self._send(_Message(error=f"{type(error).__name__}: {error}", stops=stops))
            raise
        finally:
            self._is_open = was_open
        if self.num_ranks > 1:
            self._send(_Message())
            for block, part in enumerate(itertools.chain([own], parts)):
                for rank in range(1, self.num_ranks):
                    if sizes.data_rank(rank) == block:
                        dist.send_object_list([part], rank, group=self._own_group())
        return own

    def gather(self, part: T) -> list[T]:
        """Return the parts of all blocks on rank 0, and nothing elsewhere (collective, after `share`)."""
        if self.num_ranks == 1:
            return [part]
        parts: list[Any] | None = [None] * self.num_ranks if dist.get_rank() == 0 else None
        with heartbeat.waiting("what all ranks computed", on="ranks"):
            dist.gather_object(part, parts, dst=0, group=self._own_group())
        sizes = self._sizes
        blocks = {sizes.data_rank(rank): part for rank, part in enumerate(parts or [])}  # of the last stage
        return [blocks[block] for block in sorted(blocks)]

    def _receive(self, callback: Callable[[], None] | None) -> Any:
        while True:
            received: list[Any] = [None]
            with heartbeat.waiting("what rank 0 collects", on="ranks"):
                dist.broadcast_object_list(received, src=0, group=self._own_group())
            heartbeat.tick()
            message: _Message = received[0]
            if message.is_callback:
                assert callback is not None, "rank 0 runs what every rank has"
                try:
                    callback()
                except Exception as error:
                    if not is_agreed(error):  # else rank 0 fails too, and its error ends the wait
                        raise
            elif message.stops:
                raise stop.stopped()
            elif message.error is not None:
                raise EpisodeError(f"rank 0 could not collect the batch: {message.error}")
            else:
                with heartbeat.waiting("the part of rank 0's batch", on="ranks"):
                    dist.recv_object_list(received, src=0, group=self._own_group())
                heartbeat.tick()
                return received[0]

    def run_on_every_rank(self, callback: Callable[[], None]) -> None:
        """Run a callback on this rank and on those that receive (rank 0); do nothing while others do not listen."""
        if self._is_open:
            self._send(_Message(is_callback=True))
        elif self.num_ranks > 1:
            return
        try:
            callback()
        except BaseException as error:
            self._has_left = self._is_open and not is_agreed(error)
            raise

    def _send(self, message: _Message) -> None:
        dist.broadcast_object_list([message], src=0, group=self._own_group())

    def _own_group(self) -> dist.ProcessGroup | None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return self._group

"""How what rank 0 collected reaches every rank.

Invariant: every rank leaves the exchange, with its part or with rank 0's error. The exchange has a gloo group of
its own, so it never mixes with collectives of training and works whatever backend those use.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from arealite.api.errors import EpisodeError
from arealite.utils import beacon

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)
"""Only for a rank 0 that is frozen: its waits have deadlines of their own, and its death ends the exchange at once."""


class RankZeroExchange:
    """Runs something on rank 0 and gives each rank its part. Every rank calls it in the same order."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def scatter(self, produce: Callable[[int], list[T]]) -> T:
        """Call `produce(world_size)` on rank 0 and return the entry of this rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return produce(1)[0]
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        received: list[Any] = [None]
        if dist.get_rank() != 0:
            with beacon.waiting("what rank 0 collects", on="ranks"):
                dist.scatter_object_list(received, None, src=0, group=self._group)
            beacon.tick()
            part, error = received[0]
            if error is not None:
                raise EpisodeError(f"rank 0 could not collect the batch: {error}")
            return part
        world_size = dist.get_world_size()
        try:
            parts = produce(world_size)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            dist.scatter_object_list(received, [(None, text)] * world_size, src=0, group=self._group)
            raise
        dist.scatter_object_list(received, [(part, None) for part in parts], src=0, group=self._group)
        return parts[0]

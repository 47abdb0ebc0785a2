"""How what rank 0 collected reaches every rank.

While rank 0 still produces, it may make all ranks do something together, an *interlude*. Invariant: every rank leaves
the exchange, with its part or with rank 0's error; a rank that fails alone in an interlude leaves at once, as no other
can hear of it before its process ends. The exchange has a gloo group of its own, so it never mixes with collectives of
training and works whatever backend those use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from arealite.api.errors import EpisodeError
from arealite.utils import heartbeat
from arealite.utils.distributed import is_agreed

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)
"""Only for a rank 0 that is frozen: its waits have deadlines of their own, and its death ends the exchange at once."""


class RankZeroExchange:
    """Runs something on rank 0 and gives each rank its part. Every rank calls it in the same order."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._is_open = False
        """Whether rank 0 is producing, and all others wait for it."""
        self._has_left = False
        """Whether rank 0 has left an interlude in which the others may still be."""

    def scatter(self, produce: Callable[[int], list[T]], interlude: Callable[[], None] | None = None) -> T:
        """Call `produce(world_size)` on rank 0 and return the entry of this rank.

        Other ranks run `interlude` as often as rank 0 calls `play` meanwhile.
        """
        if _is_alone():
            return produce(1)[0]
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        if dist.get_rank() != 0:
            return self._receive(interlude)
        world_size = dist.get_world_size()
        was_open, self._is_open = self._is_open, True  # an interlude may scatter
        try:
            parts = produce(world_size)
        except BaseException as error:
            if not self._has_left:
                self._send([_Message(error=f"{type(error).__name__}: {error}")] * world_size)
            raise
        finally:
            self._is_open = was_open
        self._send([_Message(part) for part in parts])
        return parts[0]

    def play(self, interlude: Callable[[], None]) -> bool:
        """Run an interlude on every rank (called on rank 0); return False if the others can't hear of it now."""
        if self._is_open:
            self._send([_Message(is_interlude=True)] * dist.get_world_size())
        elif not _is_alone():
            return False
        try:
            interlude()
        except BaseException as error:
            self._has_left = self._is_open and not is_agreed(error)
            raise
        return True

    def _receive(self, interlude: Callable[[], None] | None) -> Any:
        """Take this rank's part. An interlude that fails on every rank does so on rank 0, whose error ends the wait."""
        failure: Exception | None = None
        while True:
            received: list[Any] = [None]
            with heartbeat.waiting("what rank 0 collects", on="ranks"):
                dist.scatter_object_list(received, None, src=0, group=self._group)
            heartbeat.tick()
            message: _Message = received[0]
            if message.is_interlude:
                assert interlude is not None, "rank 0 plays what every rank has"
                try:
                    interlude()
                except Exception as error:
                    if not is_agreed(error):
                        raise
                    failure = error
                continue
            if message.error is not None:
                raise EpisodeError(f"rank 0 could not collect the batch: {message.error}")
            if failure is not None:
                raise failure
            return message.part

    def _send(self, messages: list[_Message]) -> None:
        dist.scatter_object_list([None], messages, src=0, group=self._group)


@dataclass(frozen=True)
class _Message:
    """What rank 0 tells another rank."""

    part: Any = None
    error: str | None = None
    is_interlude: bool = False


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1

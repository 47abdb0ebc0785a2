"""Watches an event loop from another thread: how late it runs, and which line of a workflow blocks it.

A callback in the loop measures its own lag; when it is overdue, the thread reads the stack of the loop's thread.
Invariant: a blocked loop is reported within 1.25 times `blocking_call_s`, while the call still blocks, unless C code
holds the GIL all the time (then the launcher reports it).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from arealite.api.errors import EpisodeTimeoutError
from arealite.utils.source_lines import SourceLine, lines_of_frame, users_line

logger = logging.getLogger("arealite.rollout")

BEAT_S = 0.05
_KEPT_LAGS = 4096


@dataclass(frozen=True)
class BlockingCall:
    """A line that blocks the loop, and since when (monotonic)."""

    line: SourceLine
    since: float


class LoopWatch:
    """The lag of one thread's loop. Built in that thread, before the loop runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, blocking_call_s: float, max_blocked_s: float) -> None:
        self.blocking: BlockingCall | None = None
        self.given_up: Future[None] = Future()
        """Fails with EpisodeTimeoutError when the loop was blocked for `max_blocked_s`."""
        self._blocking_call_s = blocking_call_s
        self._max_blocked_s = max_blocked_s
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._due = time.monotonic()
        self._lags: deque[float] = deque(maxlen=_KEPT_LAGS)
        self._reported: set[SourceLine] = set()
        self._passing: SourceLine | None = None
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="arealite-loop-watch", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return how late the loop was since the last call, counting a call that blocks it now."""
        lags = sorted([*(self._lags.popleft() for _ in range(len(self._lags))), self._overdue_s()])
        return {"perf/loop_lag_p99_s": lags[int(0.99 * (len(lags) - 1))], "perf/loop_lag_max_s": lags[-1]}

    def describe(self) -> dict[str, Any]:
        """Return the loop's state for a stall report."""
        blocking = self.blocking
        return {
            "overdue_s": round(self._overdue_s(), 3),
            "blocked_by": None if blocking is None else {"line": str(blocking.line), "since": blocking.since},
        }

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(self._blocking_call_s)

    def _overdue_s(self) -> float:
        return max(0.0, time.monotonic() - self._due)

    def _beat(self) -> None:
        now = time.monotonic()
        self._lags.append(max(0.0, now - self._due))
        self._due = now + BEAT_S
        self._loop.call_at(self._due, self._beat)

    def _watch(self) -> None:
        while not self._ended.wait(self._blocking_call_s / 4):
            overdue_s = self._overdue_s()
            if overdue_s < self._blocking_call_s:
                self.blocking = None
            else:
                self._look(time.monotonic() - overdue_s)
            if overdue_s > self._max_blocked_s and not self.given_up.done():
                self.given_up.set_exception(self._too_long())

    def _look(self, since: float) -> None:
        """Record the line that blocks; a thread in select() is not blocking the loop, it is waiting for CPU time."""
        lines, passed = lines_of_frame(sys._current_frames().get(self._loop_thread)), self._passing
        if not lines or lines[0].function.endswith("Selector.select"):
            return
        line, self._passing = users_line(lines), lines[0]
        if line is None and self._passing != passed:  # asyncio itself, between two calls that block
            return
        line = line or lines[0]
        self.blocking = BlockingCall(line, since)
        if line not in self._reported:
            self._reported.add(line)
            advice = "no other episode runs meanwhile. Await it, or call it through asyncio.to_thread."
            logger.warning("%s blocks the rollout loop for %.1f s already: %s", line, time.monotonic() - since, advice)

    def _too_long(self) -> EpisodeTimeoutError:
        where = "code that has no Python frame" if self.blocking is None else str(self.blocking.line)
        return EpisodeTimeoutError(
            f"the rollout loop must turn within {self._max_blocked_s:g} s: {where} blocks it. Await there, or call it "
            "through asyncio.to_thread."
        )

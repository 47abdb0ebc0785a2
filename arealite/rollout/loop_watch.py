"""The lag of an event loop, and the line of code that blocks it.

A callback in the loop measures its own lag; when it is overdue, a thread reads the stack of the loop's thread.
Invariant: a call of user code that blocks the loop is reported within 1.25 times `blocking_call_s`, while it still
blocks, unless C code holds the GIL all the time: then the launcher's verdict names it. asyncio's debug mode is no
alternative: it reports a call once it has ended, and records a stack for every callback.
"""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from arealite.api.errors import EpisodeTimeoutError
from arealite.api.source_lines import SourceLine, lines_of_frame, users_line

logger = logging.getLogger("arealite.rollout")

_BEAT_S = 0.05
_NUM_LAGS = 4096
_NOT_USERS_S = 5.0
_ADVICE = "Await there, or call it through asyncio.to_thread."


class LoopWatch:
    """Watches the loop of the thread in which it is made, before the loop runs."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, what: str, *, blocking_call_s: float, max_blocked_s: float
    ) -> None:
        self.blocking: SourceLine | None = None  # the line that blocks the loop
        self.given_up: Future[None] = Future()  # fails once the loop has been blocked for `max_blocked_s`
        self._blocking_call_s, self._max_blocked_s = blocking_call_s, max_blocked_s
        self._loop, self._what = loop, what
        self._loop_thread = threading.get_ident()
        self._due = time.monotonic()
        self._lags: deque[float] = deque(maxlen=_NUM_LAGS)
        self._reported: set[SourceLine] = set()
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="arealite-loop-watch", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return the lag since the last call, including a call that still blocks the loop."""
        lags = sorted([*(self._lags.popleft() for _ in range(len(self._lags))), self._overdue_s()])
        return {"perf/loop_lag_p99_s": lags[int(0.99 * (len(lags) - 1))], "perf/loop_lag_max_s": lags[-1]}

    def describe(self) -> dict[str, Any]:
        blocking = self.blocking
        return {"overdue_s": round(self._overdue_s(), 3), "blocked_by": blocking and str(blocking)}

    def close(self) -> None:
        self._ended.set()
        self._thread.join(self._blocking_call_s)

    def _overdue_s(self) -> float:
        return max(0.0, time.monotonic() - self._due)

    def _beat(self) -> None:
        now = time.monotonic()
        self._lags.append(max(0.0, now - self._due))
        self._due = now + _BEAT_S
        self._loop.call_at(self._due, self._beat)

    def _watch(self) -> None:
        report_s = min(self._blocking_call_s, self._max_blocked_s)
        while not self._ended.wait(report_s / 4):
            overdue_s = self._overdue_s()
            self.blocking = line = self._blocking_line(overdue_s) if overdue_s >= report_s else None
            if line is None:
                continue
            if line not in self._reported:
                self._reported.add(line)
                message = "%s blocks the %s for %.1f s already: no other episode runs meanwhile. %s"
                logger.warning(message, line, self._what, overdue_s, _ADVICE)
            if overdue_s > self._max_blocked_s and not self.given_up.done():
                must = f"the {self._what} must turn within {self._max_blocked_s:g} s: {line} blocks it. {_ADVICE}"
                self.given_up.set_exception(EpisodeTimeoutError(must))

    def _blocking_line(self, overdue_s: float) -> SourceLine | None:
        """Return the line that blocks the loop, if any: a thread in select() waits for CPU time or the GIL."""
        lines = lines_of_frame(sys._current_frames().get(self._loop_thread))
        if not lines or lines[0].function.endswith("Selector.select"):
            return None
        if line := users_line(lines):
            return line
        # A busy process may be late in asyncio itself, between two calls.
        return next((line for line in lines if line.room), lines[0]) if overdue_s >= _NOT_USERS_S else None

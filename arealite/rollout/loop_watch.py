"""What an event loop does now: how late it runs, which line of a workflow blocks it, and what its episodes await.

A callback in the loop measures its own lag; when it is overdue, a thread reads the stack of the loop's thread.
Invariant: a blocked loop is reported within 1.25 times `blocking_call_s`, while the call still blocks, unless C code
holds the GIL all the time (then the launcher reports it). Episodes pay nothing for being listed; another thread that
looks can see a task in the middle of a change.
"""

import asyncio
import contextlib
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from types import CoroutineType
from typing import Any

from arealite.api.errors import EpisodeTimeoutError
from arealite.api.source_lines import SourceLine, line_of, lines_of_frame, users_line
from arealite.utils import heartbeat

logger = logging.getLogger("arealite.rollout")

BEAT_S = 0.05
_KEPT_LAGS = 4096
SHOWN = 8  # oldest episodes
_OURS_S = 5.0  # from which a call without a line of the user's is worth a warning: below, the machine is busy


class LoopWatch:
    """The lag of one thread's loop. Built in that thread, before the loop runs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        what: str = "rollout loop",
        *,
        blocking_call_s: float,
        max_blocked_s: float,
    ) -> None:
        self.blocking: SourceLine | None = None  # the line that blocks the loop
        self.given_up: Future[None] = Future()  # fails with EpisodeTimeoutError after `max_blocked_s` of it
        self._blocking_call_s = blocking_call_s
        self._max_blocked_s = max_blocked_s
        self._loop, self._what = loop, what
        self._loop_thread = threading.get_ident()
        self._due = time.monotonic()
        self._lags: deque[float] = deque(maxlen=_KEPT_LAGS)
        self._reported: set[tuple[SourceLine, int]] = set()
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
        blocking, overdue_s = self.blocking, self._overdue_s()
        blocked_by = blocking and {"line": str(blocking), "since": time.monotonic() - overdue_s}
        return {"overdue_s": round(overdue_s, 3), "blocked_by": blocked_by}

    def close(self) -> None:
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
        report_s = min(self._blocking_call_s, self._max_blocked_s)
        while not self._ended.wait(report_s / 4):
            overdue_s = self._overdue_s()
            if overdue_s < report_s:
                self.blocking = None
            elif (line := self._look(overdue_s)) and overdue_s > self._max_blocked_s and not self.given_up.done():
                message = f"the {self._what} must turn within {self._max_blocked_s:g} s: {line} blocks it. "
                message += "Await there, or call it through asyncio.to_thread."
                self.given_up.set_exception(EpisodeTimeoutError(message))

    def _look(self, overdue_s: float) -> SourceLine | None:
        """Return the line that blocks, if any: a thread in select() does not block, it waits for CPU time."""
        lines, passed = lines_of_frame(sys._current_frames().get(self._loop_thread)), self._passing
        if not lines or lines[0].function.endswith("Selector.select"):
            return None
        line, self._passing = users_line(lines), lines[0]
        if line is None and self._passing != passed:  # asyncio itself, between two calls that block
            return None
        is_users = line is not None
        self.blocking = line = line or next((one for one in lines if one.room), lines[0])
        level = logging.WARNING if is_users or overdue_s >= _OURS_S else logging.DEBUG
        if (line, level) not in self._reported:
            self._reported.add((line, level))
            advice = " Await it, or call it through asyncio.to_thread." if is_users else ""
            told = "%s blocks the %s for %.1f s already: no other episode runs meanwhile.%s"
            logger.log(level, told, line, self._what, overdue_s, advice)
        return line


_runs: dict[asyncio.Task[Any], tuple[str, float]] = {}  # name and start of the episodes, oldest first


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """List the current task's episode while the block runs; its start and its end count as progress."""
    task = asyncio.current_task()
    assert task is not None, "an episode runs in a task"
    _runs[task] = name, time.monotonic()
    heartbeat.tick()
    try:
        yield
    finally:
        del _runs[task]
        heartbeat.tick()


def oldest_episodes() -> list[dict[str, Any]]:
    """Describe the episodes that have run longest: name, line, what they wait for, and since when they run."""
    oldest = itertools.islice(_runs.copy().items(), SHOWN)
    return [{"name": name, "since": since, **_place_of(task)} for task, (name, since) in oldest]


def _place_of(task: asyncio.Task[Any]) -> dict[str, str]:
    lines = list(reversed(_awaited_lines(task)))
    for line in lines:
        on = "code" if line.is_users else {"inference": "servers", "reward": "reward"}.get(line.room)
        if on is not None:
            return {"on": on, "line": str(users_line(lines) or line)}
    return {"on": "code", "line": str(lines[0]) if lines else "its end"}


def _awaited_lines(task: asyncio.Task[Any]) -> list[SourceLine]:
    """Return the lines at which a task and the tasks that it awaits are suspended, outermost first."""
    lines: list[SourceLine] = []
    following: Any = task
    while isinstance(following, asyncio.Task):
        coroutine: Any = following.get_coro()
        while isinstance(coroutine, CoroutineType):  # an `async for` hides what it awaits
            frame = coroutine.cr_frame
            lines.append(line_of(coroutine.cr_code, frame and frame.f_lineno))
            coroutine = coroutine.cr_await
        following = getattr(following, "_fut_waiter", None)
        unfinished = [child for child in getattr(following, "_children", ()) if not child.done()]
        following = unfinished[0] if unfinished else following  # the first of a gather
    return lines

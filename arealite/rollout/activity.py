"""The running episodes of this process: the lines at which they await, and the trainer's waits divided among them.

An episode is in `servers` while one of its requests is, else in `reward` while one of its rewards is, else in
`workflow`: its tasks report these phases through `utils.trace`. Invariant: a second of waiting is divided among the
episodes that run in it, so all parts together are at most the wait, and less if nothing runs. While requests fill all
slots of the servers, the part of `servers` counts as `servers_full`.
"""

import asyncio
import contextlib
import functools
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any

from arealite.api.script import SourceLine, line_of, users_line
from arealite.utils import heartbeat, trace

NUM_SHOWN = 8


class Activity:
    """The episodes of a process and what they do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._episodes: dict[asyncio.Task[Any], _Episode] = {}  # oldest first
        self._num_in: Counter[str] = Counter()  # episodes by state
        self._num_requests = 0
        self._waited_s: defaultdict[str, float] = defaultdict(float)
        self._waits_since: float | None = None  # start of the part of a wait that is not divided yet
        self._num_slots: Callable[[], int | None] = lambda: None

    @contextlib.contextmanager
    def episode(self, name: str) -> Iterator[None]:
        """Count the current task and the tasks that it starts as an episode; its start and its end are progress."""
        task = asyncio.current_task()
        assert task is not None, "an episode runs in a task"
        episode = self._episodes[task] = _Episode(name)
        with self._lock:
            self._divide()
            self._num_in[episode.state] += 1
        heartbeat.tick()
        token = trace.phase_observer.set(functools.partial(self._observe, episode))
        try:
            with trace.span("episode", prompt=name):
                yield
        finally:
            trace.phase_observer.reset(token)
            with self._lock:
                self._divide()
                self._num_in[episode.state] -= 1
                episode.is_over = True
            del self._episodes[task]
            heartbeat.tick()

    def _observe(self, episode: "_Episode", phase: str, change: int) -> None:
        """Note the begin or end of a phase in a task of an episode, which may be over."""
        with self._lock:
            self._divide()
            self._num_requests += change if phase == "servers" else 0
            self._num_in[episode.state] -= not episode.is_over
            episode.num_open[phase] += change
            self._num_in[episode.state] += not episode.is_over

    @contextlib.contextmanager
    def waiting(self, num_slots: Callable[[], int | None]) -> Iterator[None]:
        """Divide the time of the block among the episodes; `num_slots` returns the servers' slots, None if unknown."""
        with trace.span("wait for a batch"):
            self._waits_since, self._num_slots = time.monotonic(), num_slots
            try:
                yield
            finally:
                with self._lock:
                    self._divide()
                    self._waits_since = None

    def take_waits(self) -> dict[str, float]:
        """Return the seconds of waits since the last call, by state of the episodes."""
        with self._lock:
            waited_s, self._waited_s = self._waited_s, defaultdict(float)
        return dict(waited_s)

    def oldest(self) -> list[dict[str, Any]]:
        """Describe the episodes that have run longest: name, state, line, and for how long they run."""
        now, oldest = time.monotonic(), itertools.islice(self._episodes.copy().items(), NUM_SHOWN)
        return [
            {"name": episode.name, "on": episode.state, "line": _line_of(task), "for_s": now - episode.began_s}
            for task, episode in oldest
        ]

    def _divide(self) -> None:
        """Divide the time since the last change among the episodes by their states, with the lock."""
        if self._waits_since is None:
            return
        since, self._waits_since = self._waits_since, time.monotonic()
        slots, total = self._num_slots(), self._num_in.total()
        for state, number in self._num_in.items() if total else ():
            is_full = state == "servers" and slots is not None and self._num_requests >= slots
            self._waited_s["servers_full" if is_full else state] += (self._waits_since - since) * number / total


class _Episode:
    """A running episode, and how many of its tasks are in each phase."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began_s = time.monotonic()
        self.num_open: Counter[str] = Counter()
        self.is_over = False

    @property
    def state(self) -> str:
        return "servers" if self.num_open["servers"] else "reward" if self.num_open["reward"] else "workflow"


activity = Activity()


def _line_of(task: asyncio.Task[Any]) -> str:
    """Return the innermost line of user code at which a task is suspended, or else its innermost line."""
    lines: list[SourceLine] = []
    coroutine: Any = task.get_coro()
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        lines.insert(0, line_of(coroutine.cr_code, frame and frame.f_lineno))
        coroutine = coroutine.cr_await
    return str(users_line(lines) or next(iter(lines), "its end"))

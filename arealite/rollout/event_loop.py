"""An asyncio loop in a daemon thread, called from ordinary code.

Invariants: no caller waits for a loop that has ended or is blocked for too long: its call fails with the cause, or with
the line that blocks the loop; coroutines have deadlines of their own. A call of user code that blocks the loop is
reported within 1.25 times `blocking_call_s`, while it still blocks, unless C code holds the GIL all the time: then the
launcher's verdict names it.

The activity of a process: the lines at which its episodes await, and the trainer's waits divided among them. An episode
is in `servers` while one of its requests is, else in `reward` while one of its rewards is, else in `workflow`: its
tasks report these phases through `utils.trace`. A second of waiting is divided among the episodes that run in it, so
all parts together are at most the wait, and less if nothing runs. While requests fill all slots of the servers, the
part of `servers` counts as `servers_full`.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import CoroutineType
from typing import Any, TypeVar, cast

from arealite.api.errors import EpisodeTimeoutError
from arealite.api.script import SourceLine, line_of, lines_of_frame, users_line
from arealite.utils import heartbeat, trace
from arealite.utils.background import DaemonThreads

T = TypeVar("T")
logger = logging.getLogger("arealite.rollout")

_SWITCH_S = 0.001  # how long another thread may keep the GIL from the loop; 5 ms by default
_WIND_UP_ROUNDS = 3  # a task that is cancelled may have started another
_MAX_USER_THREADS = 32  # of calls that workflows make by `asyncio.to_thread`
_BEAT_S = 0.05
_NUM_LAGS = 4096
_NOT_USERS_S = 5.0
_ADVICE = "Await there, or call it through asyncio.to_thread."


class EventLoopThread:
    """Runs coroutines for other threads until closed."""

    def __init__(
        self, name: str, *, what: str = "rollout loop", blocking_call_s: float = 1.0, max_blocked_s: float = 3600.0
    ) -> None:
        """A call that blocks the loop is reported after `blocking_call_s` and given up after `max_blocked_s`."""
        self._what = what  # in messages
        self._limits_s = {"blocking_call_s": blocking_call_s, "max_blocked_s": max_blocked_s}
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._ended: Future[None] = Future()
        self._cause: BaseException | None = None
        # Run in the loop when it ends, after every task was cancelled.
        self.closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self.loop = self._loop.result()
        heartbeat.report(f"loop {name}", self.watch.describe)
        heartbeat.report("episodes", lambda: {"oldest": activity.oldest()})

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return at once."""
        if self._ended.done() or self._cause is not None:
            coroutine.close()
            raise self._ended_error()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop unless it has ended; from any thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; it is cancelled if the caller is interrupted."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                f"a blocking call must come from outside the {self._what}: got one from a workflow or reward. "
                "Await agenerate there instead."
            )
        pending = self.submit(coroutine)
        ends: set[Future[Any]] = {pending, self._ended, self.watch.given_up}
        try:
            with heartbeat.waiting(f"the {self._what} to finish {cast('Any', coroutine).__qualname__}", on="rollout"):
                wait(ends, return_when=FIRST_COMPLETED)
        except BaseException:
            pending.cancel()
            raise
        if not pending.done() and not self._ended.done():
            self.watch.given_up.result()  # raises
        if not pending.done() or pending.cancelled():
            raise self._ended_error()
        return pending.result()

    def close(self, timeout_s: float) -> None:
        """Cancel every task and join the thread; a thread that does not end in time runs until the process ends."""
        self.call_soon(self._must_end.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            line = self.watch.blocking or "a workflow"
            logger.warning("the %s did not end within %g s: %s blocks it", self._what, timeout_s, line)

    def _main(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        try:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                loop.set_default_executor(DaemonThreads(_MAX_USER_THREADS, "workflow-call"))
                self._must_end = asyncio.Event()
                self.watch = LoopWatch(loop, self._what, **self._limits_s)
                self._loop.set_result(loop)
                self._cause = _failure(runner, self._must_end.wait)
                # Each part in a run of its own, so that a failure does not skip the others.
                for part in (*[_cancel_tasks] * _WIND_UP_ROUNDS, *self.closers):
                    if (error := _failure(runner, part)) is not None:
                        logger.error("the %s did not end in order", self._what, exc_info=error)
        except Exception as error:  # too many open files at the start, or no memory for a thread at the end
            if self._loop.done():
                logger.error("the %s did not end in order: %s", self._what, error)
            else:
                self._loop.set_exception(error)
        finally:
            self._ended.set_result(None)
            if self._loop.exception() is None:
                self.watch.close()

    def _ended_error(self) -> RuntimeError:
        reason = "closed" if self._cause is None else repr(self._cause)
        error = RuntimeError(f"the {self._what} must be running: it has ended ({reason}). Initialize a new engine.")
        error.__cause__ = self._cause
        return error


def _failure(runner: asyncio.Runner, part: Callable[[], Coroutine[Any, Any, object]]) -> BaseException | None:
    """Run a coroutine, and return the exception by which it or another task ended the loop."""
    try:
        runner.run(part())
    except BaseException as error:
        return error
    return None


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class LoopWatch:
    """The lag of a loop, and the line of code that blocks it; made in the thread of the loop, before the loop runs.

    A callback in the loop measures its own lag; when it is overdue, a thread reads the stack of the loop's thread.
    asyncio's debug mode reports a call only after its end, and records a stack for every callback.
    """

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


NUM_SHOWN = 8


class Activity:
    """The episodes of a process and what they do."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic  # a simulation has its own
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
        episode = self._episodes[task] = _Episode(name, self.clock())
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
            self._waits_since, self._num_slots = self.clock(), num_slots
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
        now, oldest = self.clock(), itertools.islice(self._episodes.copy().items(), NUM_SHOWN)
        return [
            {"name": episode.name, "on": episode.state, "line": _line_of(task), "for_s": now - episode.began_s}
            for task, episode in oldest
        ]

    def _divide(self) -> None:
        """Divide the time since the last change among the episodes by their states, with the lock."""
        if self._waits_since is None:
            return
        since, self._waits_since = self._waits_since, self.clock()
        slots, total = self._num_slots(), self._num_in.total()
        for state, number in self._num_in.items() if total else ():
            is_full = state == "servers" and slots is not None and self._num_requests >= slots
            self._waited_s["servers_full" if is_full else state] += (self._waits_since - since) * number / total


class _Episode:
    """A running episode, and how many of its tasks are in each phase."""

    def __init__(self, name: str, began_s: float) -> None:
        self.name, self.began_s = name, began_s
        self.num_open: defaultdict[str, int] = defaultdict(int)  # a Counter takes longer for what it lacks
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
        # If it runs in another thread, CPython 3.11 reads `cr_await` from a stack that changes, and may crash.
        coroutine = None if coroutine.cr_running else coroutine.cr_await
    return str(users_line(lines) or next(iter(lines), "its end"))

"""One asyncio loop in a daemon thread, called from ordinary code.

Invariant: no caller waits for a loop that has ended or does not turn. A loop that dies (KeyboardInterrupt or SystemExit
in a task, or a defect) fails the call in progress and every later one, with what killed it as the cause; one that a
call blocks for too long fails them with the line of that call. Coroutines have deadlines of their own.
"""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, TypeVar, cast

from arealite.rollout.activity import activity
from arealite.rollout.loop_watch import LoopWatch
from arealite.utils import heartbeat
from arealite.utils.threads import DaemonThreads

T = TypeVar("T")
logger = logging.getLogger("arealite.rollout")

# How long another thread of the process may compute before the loop gets Python's lock back; by default 5 ms.
_SWITCH_S = 0.001
_WIND_UP_ROUNDS = 3  # a task that is cancelled may have started another
_MAX_USER_THREADS = 32  # of calls that workflows make by `asyncio.to_thread`


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
        self._asked: Future[None] = Future()
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
        """Have something called in the loop, from any thread, unless it has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def ask(self) -> None:
        """Have the thread that waits in `run`, now or next, call its `on_asked`; from any thread."""
        with contextlib.suppress(InvalidStateError):  # it is asked already
            self._asked.set_result(None)

    def run(self, coroutine: Coroutine[Any, Any, T], on_asked: Callable[[], None] | None = None) -> T:
        """Run a coroutine and return its result; as often as someone asks meanwhile, call `on_asked` in this thread.

        The coroutine is cancelled if the caller is interrupted or `on_asked` fails.
        """
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
                while not wait(ends | ({self._asked} if on_asked else set()), return_when=FIRST_COMPLETED).done & ends:
                    assert on_asked is not None, "nothing else ends a wait early"
                    self._asked = Future()
                    on_asked()
        except BaseException:
            pending.cancel()
            raise
        if not pending.done() and not self._ended.done():
            self.watch.given_up.result()  # raises
        if not pending.done() or pending.cancelled():
            raise self._ended_error()
        return pending.result()

    def close(self, timeout_s: float) -> None:
        """Cancel every task and join the thread; one that does not end in time is left to the end of the process."""
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
                # Each in a run of its own: what fails does not keep the others from ending.
                for part in (*[_cancel_tasks] * _WIND_UP_ROUNDS, *self.closers):
                    if (error := _failure(runner, part)) is not None:
                        logger.error("the %s did not end in order", self._what, exc_info=error)
        except Exception as error:  # a process may lack a file to begin, or memory for the thread that it ends with
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
    """Run a coroutine, and return what it or another task raised to end the loop."""
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

"""Blocking calls in threads that nothing waits for: neither the end of a loop nor that of the process.

The threads of `concurrent.futures` are joined at exit, so one call without a timeout keeps a finished process alive.
Calls of users share `DaemonThreads`; calls of our own use `in_thread`, which never waits for a free thread.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """A default executor of an event loop (asyncio insists on the base class, none of which is used)."""

    def __init__(self, max_threads: int, name: str) -> None:
        super().__init__(max_threads, name)
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_left = max_threads  # threads that may still be started
        self._idle = threading.Semaphore(0)  # counts threads that wait for a call
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._num_left:
                self._num_left -= 1
                threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
            self._calls.put(partial(resolve, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let threads end after the calls that are queued, and wait for none."""
        self._calls.put(None)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # else it would live until the next one comes
            self._idle.release()
        self._calls.put(None)  # for the next thread


def start_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a blocking function in a thread of its own, and return at once."""
    future: Future[T] = Future()
    threading.Thread(target=resolve, args=(future, partial(function, *args)), name="call", daemon=True).start()
    return future


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a thread of its own."""
    return await asyncio.wrap_future(start_thread(function, *args))


def resolve(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function for the result of a future, unless that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # the future raises it
        future.set_exception(error)

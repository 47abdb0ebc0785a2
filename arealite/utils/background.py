"""Work in the background: tasks of an event loop, and blocking calls in daemon threads.

No task fails silently: a failure is logged when it happens and raised by the owner's next `check`. Only the message of
an error is logged, because asyncio would log its repr, and that of an HTTP error contains the request's headers with
the secret of the run.

No thread delays the end of a loop or of the process: threads of `concurrent.futures` are joined at exit, so one call
without a timeout would keep a finished process alive. Users' calls share `DaemonThreads`; our own calls use
`in_thread`, which never waits for a free thread.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
MAX_IDLE = 32  # threads that wait for the next call; traces of a stall show a hundred at most


async def gathered(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines as concurrent tasks and return their results; the first error cancels the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class BackgroundTasks:
    """The tasks of one owner; `what` names them in messages, `on_failure` wakes the owner."""

    def __init__(self, what: str, logger: logging.Logger, on_failure: Callable[[], None] | None = None) -> None:
        self.error: BaseException | None = None  # the first
        self._what, self._logger, self._on_failure = what, logger, on_failure
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, coroutine: Coroutine[Any, Any, None], key: Hashable = None) -> asyncio.Task[None]:
        """Start a task, or return the running task of the same `key`; without a key, always start one."""
        key = object() if key is None else key
        if key in self._tasks and not self._tasks[key].done():
            coroutine.close()
            return self._tasks[key]
        task = self._tasks[key] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda task: self._end(key, task))
        return task

    def check(self) -> None:
        """Raise if a task has failed."""
        if self.error is not None:
            message = f"{self._what} must not fail: got {type(self.error).__name__}: {self.error}. See the log."
            raise RuntimeError(message) from self.error

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, key: Hashable, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:  # the next task of its key may have started before this callback
            del self._tasks[key]
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._logger.error("%s failed", self._what, exc_info=error)
        self.error = error if self.error is None else self.error
        if self._on_failure is not None:
            self._on_failure()


class DaemonThreads(ThreadPoolExecutor):
    """An executor for an event loop (asyncio requires the base class, of which nothing is used)."""

    def __init__(self, max_threads: int | None, name: str) -> None:
        """With None a call never waits for a free thread."""
        super().__init__(max_threads, name)
        self._name, self._max_threads = name, max_threads or sys.maxsize
        self.begin()

    def begin(self) -> None:
        """Forget all threads, as a forked child must."""
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_left = self._max_threads  # threads that may still be started
        self._num_spare = 0  # threads that wait for a call, less the calls that wait for a thread
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._num_spare -= 1
            if self._num_spare < 0 and self._num_left:
                self._num_left -= 1
                self._num_spare += 1
                threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
            self._calls.put(partial(resolve, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the queued calls, without waiting for them."""
        self._calls.put(None)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it would live until the next call
            with self._lock:
                if self._num_spare == MAX_IDLE:
                    self._num_left += 1
                    return
                self._num_spare += 1
        self._calls.put(None)  # for the next thread


_threads = DaemonThreads(None, "call")
os.register_at_fork(after_in_child=_threads.begin)


def start_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a blocking function in a thread that nothing else uses meanwhile, and return at once."""
    return _threads.submit(function, *args)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a thread that nothing else uses meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args))


def resolve(future: Future[T], function: Callable[[], T]) -> None:
    """Set the result of a future from a function, unless the future is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # the future raises it
        future.set_exception(error)

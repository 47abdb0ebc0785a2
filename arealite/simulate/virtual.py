"""Virtual time for the rollout runtime: an event loop whose clock jumps to the next timer, turned by its caller.

Everything runs in one thread, so a simulation is deterministic. The caller that waits (the training loop, in `run` or
in a future's `result`) turns the loop meanwhile. A runtime that waits for nothing that is to come fails at once.
"""

import asyncio
import contextlib
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")

_RESOLUTION_S = 1e-6  # timers that are due within this time of each other fire together


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set."""


class _Jump(selectors.SelectSelector):
    """Waits for nothing but time, which passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(f"a task must be ready or a timer set: got neither at {self.now:.3f} virtual s")
        self.now += max(0.0, timeout)
        return []


class _NoTransport(asyncio.Transport):
    """A connection over which nothing travels."""

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return True


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: connections open at once, and calls in threads run inline."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = _RESOLUTION_S
        self.error: BaseException | None = None  # of a callback, which asyncio would only log
        self.set_exception_handler(self._note_error)

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context:
            self.error = self.error or context["exception"]
            self.stop()
        else:
            self.default_exception_handler(context)

    def time(self) -> float:
        return self._jump.now

    async def create_connection(self, protocol_factory: Callable[[], Any], *args: Any, **options: Any) -> Any:
        return _NoTransport(), protocol_factory()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _Driven(Future[T]):
    """The future of a task, whose caller turns the loop until it is done."""

    def __init__(self, loop: VirtualLoop, task: "asyncio.Task[T]") -> None:
        super().__init__()
        self._loop, self._task = loop, task
        task.add_done_callback(self._take)

    def _take(self, task: "asyncio.Task[T]") -> None:
        if task.cancelled():
            super().cancel()
        elif not self.set_running_or_notify_cancel():
            task.exception()  # nobody wants it any more
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())

    def cancel(self) -> bool:
        self._task.cancel()
        return super().cancel()

    def result(self, timeout: float | None = None) -> T:
        """Turn the loop until the task is done, or for so many virtual seconds."""
        loop = self._loop
        if loop.is_running() and not self.done():
            raise RuntimeError("a blocking call must come from outside the event loop: got one from a workflow")
        deadline = math.inf if timeout is None else loop.time() + timeout
        timer = None if timeout is None else loop.call_later(timeout, loop.stop)
        self.add_done_callback(lambda _: loop.stop())
        while not self.done() and loop.time() < deadline:
            loop.run_forever()
            if (error := loop.error) is not None:
                loop.error = None
                raise error
        if timer is not None:
            timer.cancel()
        return super().result(0)


class VirtualLoopThread:
    """Has the methods of an `EventLoopThread`, without a thread."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.watch = loop, SimpleNamespace(blocking=None, metrics=dict)  # nothing blocks it
        self.closers: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return _Driven(self.loop, self.loop.create_task(coroutine))

    def call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon(callback)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        pending = self.submit(coroutine)
        try:
            return pending.result()
        finally:
            pending.cancel()  # no effect at its end

    def close(self, timeout_s: float) -> None:
        self.run(self._end())

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for closer in self.closers:
            await closer()

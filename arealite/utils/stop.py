"""Graceful stop: inside `obeying`, SIGTERM or SIGINT asks the run to stop; elsewhere they end the process.

All ranks must stop at the same point: where they agree to, or where rank 0 shares a batch that it could not collect.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked_by = 0  # number of the signal
_wakes: list[Callable[[], object]] = []


class RunStopped(SystemExit):
    """The run was asked to stop. Every rank raises it; a script must not catch it."""


class Interrupted(Exception):
    """A wait ended because the run is to stop."""


@contextmanager
def obeying() -> Iterator[None]:
    """Treat the first signal as a request to stop; a second signal has its usual effect."""
    global _asked_by
    if threading.current_thread() is not threading.main_thread():  # only it may set signal handlers
        yield
        return
    usual = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, action in usual.items():
            signal.signal(number, action)

    def take(number: int, frame: FrameType | None) -> None:
        global _asked_by
        restore()
        _asked_by = number
        for wake in list(_wakes):
            wake()

    for number in _SIGNALS:
        signal.signal(number, take)
    try:
        yield
    finally:
        restore()
        _asked_by = 0


def is_asked() -> bool:
    return _asked_by != 0


def stopped() -> RunStopped:
    """Return the exception to raise, with the exit status of a process that the signal ended."""
    return RunStopped(128 + (_asked_by or signal.SIGTERM))


async def unless_asked(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function; cancel it and raise Interrupted if the run is to stop before it has ended."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(function(*args))

    def wake() -> None:  # called by a signal handler
        loop.call_soon_threadsafe(task.cancel)

    _wakes.append(wake)
    try:
        if is_asked():
            task.cancel()
        return await task
    except asyncio.CancelledError:
        if is_asked():
            raise Interrupted from None
        raise
    finally:
        _wakes.remove(wake)

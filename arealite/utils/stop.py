"""An order to end the run in order: SIGTERM or SIGINT while `obeying`. Outside of it both end the process as ever.

All ranks must stop at one point: where they agree on it, or where rank 0 shares what it could not collect any more.
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
    """The run ends because it was asked to. Every rank raises it, and a script lets it pass."""


class Interrupted(Exception):
    """A wait ended because the run is to stop."""


@contextmanager
def obeying() -> Iterator[None]:
    """Take the first signal for an order to stop; a second one does what it always did."""
    global _asked_by
    if threading.current_thread() is not threading.main_thread():  # which alone may set what signals do
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
    """Return what to raise, with the exit status of a process that the signal ended."""
    return RunStopped(128 + (_asked_by or signal.SIGTERM))


async def unless_asked(function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine function; cancel it and raise Interrupted if the run is to stop before it has ended."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:  # called by a signal handler
        loop.call_soon_threadsafe(asked.set)

    _wakes.append(wake)
    if is_asked():
        _wakes.remove(wake)
        raise Interrupted
    task, order = loop.create_task(function(*args)), loop.create_task(asked.wait())
    try:
        await asyncio.wait({task, order}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        raise Interrupted
    finally:
        _wakes.remove(wake)
        task.cancel()
        order.cancel()

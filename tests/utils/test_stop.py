"""A signal is an order to stop while someone obeys it, and what it always was before, after, and the second time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from arealite.utils import stop


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop.obeying():
        signal.raise_signal(signal.SIGINT)
        assert stop.is_asked() and stop.stopped().code == 130
        signal.raise_signal(signal.SIGINT)
    assert not stop.is_asked()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_sigterm_ends_a_wait_and_what_waits() -> None:
    """Whichever comes first: the order, or the wait."""
    ended: list[str] = []

    async def wait() -> None:
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await asyncio.Event().wait()
        finally:
            ended.append("waited")

    thread_result: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(stop.unless_asked(wait))
        except stop.Interrupted as error:
            thread_result.append(error)

    with stop.obeying():
        for _ in range(2):
            waiter = threading.Thread(target=run)
            waiter.start()
            waiter.join(60)
    assert ended == ["waited"] and len(thread_result) == 2, "the second one does not even begin"
    assert stop.stopped().code == 143


def test_a_wait_that_ends_by_itself_returns_or_raises() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ZeroDivisionError

    assert asyncio.run(stop.unless_asked(answer)) == 42
    with pytest.raises(ZeroDivisionError):
        asyncio.run(stop.unless_asked(fail))

"""Reward functions, and errors for workflows as well, that do everything wrong. Imports no torch: workers import it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from arealite.api.errors import EnvError, RewardError


class Unprintable(Exception):
    """Can be neither printed nor pickled nor compared."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")

    def __eq__(self, other: object) -> bool:
        raise TypeError("no comparison")

    __hash__ = Exception.__hash__


class Panic(BaseException):
    """As extensions written in Rust raise it."""


class ThreeArguments(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int, three: int) -> None:
        super().__init__("three")


def _circle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


RAISED: tuple[Callable[[], BaseException], ...] = (
    *(ValueError, KeyError, StopAsyncIteration, MemoryError, RecursionError, GeneratorExit, TimeoutError, EOFError),
    *(asyncio.CancelledError, asyncio.InvalidStateError, Unprintable, Panic, _circle, OSError, ImportError),
    *(lambda: ThreeArguments(1, 2, 3), lambda: ValueError("m" * 10**7), lambda: ValueError("\ud800\0\x1b]")),
    *(lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), lambda: ExceptionGroup("g", [OSError(), Unprintable()])),
    *(lambda: BaseExceptionGroup("g", [Panic()]), lambda: BaseExceptionGroup("g", [GeneratorExit()])),
    *(lambda: BaseExceptionGroup("g", [asyncio.CancelledError()]), lambda: EnvError("tool"), lambda: RewardError("r")),
)


def _fork_twice() -> float:
    """Return twice, from parent and child."""
    return 1.0 if os.fork() else 99.0


def _leave_a_child() -> float:
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    return 1.0


def _hang() -> float:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(3600)


def _recurse() -> float:
    return _recurse()


def _raise(error: BaseException) -> Any:
    raise error


REWARDS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    **{f"raises {n}": (lambda n=n: _raise(RAISED[n]()), {"exception"}) for n in range(len(RAISED))},  # type: ignore[misc]
    **{f"returns {v!r}": (lambda v=v: v, {"contract"}) for v in (None, "1", [], {}, b"", 1j, "nan", (1,), ...)},  # type: ignore[misc]
    **{f"returns {v!r}": (lambda v=v: v, {"contract"}) for v in (float("nan"), float("inf"), -1e999, 10**400)},  # type: ignore[misc]
    **{f"returns {v!r}": (lambda v=v: v, {"ok"}) for v in (True, 1, 0.5, -1e300)},  # type: ignore[misc]
    "exits": (lambda: sys.exit(3), {"exception"}),
    "exits at once": (lambda: os._exit(0), {"crash"}),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGSEGV), {"crash"}),
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), {"timeout"}),
    "hangs": (_hang, {"timeout"}),
    "recurses": (_recurse, {"exception"}),
    "closes files": (lambda: os.closerange(0, 1000), {"crash"}),
    "forks and returns twice": (_fork_twice, {"ok"}),
    "leaves a child": (_leave_a_child, {"ok"}),
    "takes memory": (lambda: len(bytearray(b"x") * 2**30) and time.sleep(3600), {"crash", "exception", "timeout"}),
    "prints": (lambda: print("\x1b]" * 10**6) or 1.0, {"ok"}),
    "leaks threads": (lambda: [threading.Thread(target=_hang).start() for _ in range(9)] and 1.0, {"ok"}),
    "leaves the folder": (lambda: os.chdir("/") or 1.0, {"ok"}),
}


def reward(what: str, value: float) -> Any:
    """Do what is asked, or return the value."""
    return REWARDS[what][0]() if what else value


async def areward(what: str, value: float) -> Any:
    """The same in the event loop."""
    return reward(what, value)

"""What the episodes of this process do, and how the trainer's wait for a batch divides over it.

An episode is in `servers` while one of its requests is, else in `reward` while one of its rewards is, else in
`workflow`. Invariant: a second of waiting is divided among the episodes that run in it, so all parts together are at
most the wait; they are less where nothing runs. Requests that fill all slots of the servers make it `servers_full`.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from arealite.utils import trace

_doing: ContextVar[Counter[str] | None] = ContextVar("what the tasks of an episode do", default=None)
_lock = threading.Lock()
_episodes: Counter[str] = Counter()  # by what they do
_waited_s: defaultdict[str, float] = defaultdict(float)
_num_requests = 0
_num_waits = 0
_since = 0.0
_num_slots: Callable[[], int | None] | None = None


def serve_with(num_slots: Callable[[], int | None]) -> None:
    """Ask this how many requests the servers run at once; None is unknown."""
    global _num_slots
    _num_slots = num_slots


@contextmanager
def waiting() -> Iterator[None]:
    """Divide the time of the block among what episodes do meanwhile."""
    _change(num_waits=1)
    with trace.span("wait for a batch"):  # what it writes at its end takes time that is none of the wait
        try:
            yield
        finally:
            _change(num_waits=-1)


def take_waits() -> dict[str, float]:
    """Return the seconds of waits since the last call, by what episodes did."""
    with _lock:
        waited_s = {kind: _waited_s.pop(kind) for kind in list(_waited_s)}
    return waited_s


@contextmanager
def episode(prompt: str = "") -> Iterator[None]:
    """Count an episode, whose tasks are started in the block."""
    doing = Counter[str]()
    token = _doing.set(doing)
    _change(after=_state(doing))
    with trace.span("episode", prompt=prompt):
        try:
            yield
        finally:
            _change(before=_state(doing))
            doing["over"] = 1  # tasks that it leaves behind count no more
            _doing.reset(token)


@contextmanager
def doing(kind: str) -> Iterator[None]:
    """Note that a task of an episode is in `servers` or `reward`."""
    _do(kind, 1)
    with trace.span(kind):
        try:
            yield
        finally:
            _do(kind, -1)


def _do(kind: str, number: int) -> None:
    mine = _doing.get()
    num_requests = number if kind == "servers" else 0
    if mine is None or mine["over"]:
        return _change(num_requests=num_requests)
    before = _state(mine)
    mine[kind] += number
    _change(before=before, after=_state(mine), num_requests=num_requests)


def _state(doing: Counter[str]) -> str:
    return "servers" if doing["servers"] else "reward" if doing["reward"] else "workflow"


def _change(*, before: str | None = None, after: str | None = None, num_requests: int = 0, num_waits: int = 0) -> None:
    """Settle the time until now, and note what is otherwise from now on."""
    global _since, _num_requests, _num_waits
    with _lock:
        now, total = time.monotonic(), _episodes.total()
        slots = _num_slots() if _num_waits and _num_slots else None
        for kind, number in _episodes.items() if _num_waits and total else ():
            is_full = kind == "servers" and slots is not None and _num_requests >= slots
            _waited_s["servers_full" if is_full else kind] += (now - _since) * number / total
        _since = now
        _num_requests += num_requests
        _num_waits += num_waits
        if before is not None:
            _episodes[before] -= 1
        if after is not None:
            _episodes[after] += 1

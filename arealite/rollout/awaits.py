"""Where running episodes are: since when each runs, and the line of user code at which it awaits.

May be read from any thread, which can then see a task in the middle of a change; episodes pay nothing for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import CoroutineType
from typing import Any

from arealite.utils import heartbeat
from arealite.utils.source_lines import SourceLine, line_of

SHOWN = 8


@dataclass(frozen=True, eq=False)
class _Run:
    name: str
    since: float
    task: asyncio.Task[Any]


_runs: dict[_Run, None] = {}  # oldest first


@contextlib.contextmanager
def running(name: str) -> Iterator[None]:
    """List the current task's episode while the block runs; its start and its end count as progress."""
    task = asyncio.current_task()
    assert task is not None, "an episode runs in a task"
    run = _Run(name, time.monotonic(), task)
    _runs[run] = None
    heartbeat.tick()
    try:
        yield
    finally:
        del _runs[run]
        heartbeat.tick()


def oldest() -> list[dict[str, Any]]:
    """Describe the episodes that have run longest: name, line, what they wait for, and since when they run."""
    return [_described(run) for run in itertools.islice(list(_runs), SHOWN)]


def _described(run: _Run) -> dict[str, Any]:
    lines = list(reversed(awaited_lines(run.task)))
    for line in lines:
        on = "code" if line.is_users else {"inference": "servers", "reward": "reward"}.get(line.room)
        if on is not None:
            shown = next((line for line in lines if line.is_users), line)
            return {"name": run.name, "since": run.since, "on": on, "line": str(shown)}
    return {"name": run.name, "since": run.since, "on": "code", "line": str(lines[0]) if lines else "its end"}


def awaited_lines(task: asyncio.Task[Any]) -> list[SourceLine]:
    """Return the lines at which a task and the tasks that it awaits are suspended, outermost first."""
    lines: list[SourceLine] = []
    following: Any = task
    while isinstance(following, asyncio.Task):
        lines += _lines_of(following.get_coro())
        following = getattr(following, "_fut_waiter", None)
        unfinished = [child for child in getattr(following, "_children", ()) if not child.done()]
        following = unfinished[0] if unfinished else following  # the first of a gather
    return lines


def _lines_of(coroutine: Any) -> Iterator[SourceLine]:
    """Walk down the `await`s of coroutines; an `async for` hides what it awaits."""
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        yield line_of(coroutine.cr_code, frame and frame.f_lineno)
        coroutine = coroutine.cr_await

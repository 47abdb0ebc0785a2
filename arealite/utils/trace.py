"""The trace of a run for Perfetto: spans of all its processes on one clock, as Chrome's JSON.

A launcher names the folder in AREALITE_TRACE_DIR, without which nothing is written. Each process appends whole lines to
a file of its own there, so a killed one loses at most the last; `finish` joins them. Times are those since the first
process began, by the monotonic clock of the node: nodes differ by what their wall clocks do.

Spans of a thread nest. In an event loop, where they don't, they are asynchronous and name the span around them as `in`.
"""

import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Awaitable
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from arealite.utils.processes import identity, machine

FOLDER_VARIABLE = "AREALITE_TRACE_DIR"
MAX_BYTES = 64 << 20
"""Of one process."""
_ENDED = "ended"  # a file that tells all processes to write no more
_LOOK_S = 1.0  # between two looks at it
_OFF = contextlib.nullcontext()

T = TypeVar("T")
logger = logging.getLogger("arealite.trace")
_around: ContextVar[int | None] = ContextVar("the asynchronous span around this one", default=None)


class _Writer:
    """Appends events to the file of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ids = itertools.count(1)
        began_s = _first_told(folder, "began", time.time())
        self._offset_s = _first_told(folder, machine(), time.time() - time.monotonic()) - began_s
        self._pid = zlib.crc32(f"{machine()}.{os.getpid()}".encode()) >> 1  # pids of several nodes may be equal
        path = folder / f"{machine()}.{identity(os.getpid())}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._left_bytes, self._is_cut = MAX_BYTES, False
        self._threads: set[int] = set()  # that have their name in the file
        self._looked_s, self._is_wanted = -_LOOK_S, True
        shown = f"{name} (pid {os.getpid()}, {os.uname().nodename})"
        self._append({"ph": "M", "name": "process_name", "args": {"name": shown}})

    def write(self, event: dict[str, Any], at_s: float, ended_s: float | None = None) -> None:
        """Append an event at a time of the monotonic clock, or one that lasted until another."""
        now, thread = time.monotonic(), threading.get_native_id()
        if now - self._looked_s > _LOOK_S:
            self._looked_s, self._is_wanted = now, not (self.folder / _ENDED).exists()
        if not self._is_wanted or self._left_bytes <= 0:
            return
        if thread not in self._threads:
            self._threads.add(thread)
            named = {"name": threading.current_thread().name}
            self._append({"ph": "M", "name": "thread_name", "tid": thread, "args": named})
        times_us = [round((time_s + self._offset_s) * 1e6, 3) for time_s in (at_s, ended_s or at_s)]
        event |= {"ts": times_us[0], "tid": thread}
        if ended_s is not None:
            event["dur"] = round(times_us[1] - times_us[0], 3)  # so that no rounding tears what nests apart
        self._append(event)
        if self._left_bytes <= 0:
            self._append(event | {"ph": "i", "name": f"the {MAX_BYTES >> 20} MiB of this process are full", "s": "p"})

    def _append(self, event: dict[str, Any]) -> None:
        line = json.dumps({"pid": self._pid, **event}, default=str).encode() + b"\n"
        self._left_bytes -= len(line)
        if self._is_cut:
            return
        try:
            self._is_cut = os.write(self._file, line) < len(line)
        except OSError:
            self._is_cut = True
        if self._is_cut:
            self._left_bytes = 0
            logger.warning("the trace of this process ends: the disk of %s takes no more", self.folder)


class _Span:
    """One span, written when it ends; an asynchronous one also when it begins."""

    def __init__(self, writer: _Writer, name: str, args: dict[str, Any]) -> None:
        self._writer, self._name, self._args = writer, name, args
        self._id: int | None = None

    def __enter__(self) -> None:
        self._began_s = time.monotonic()
        if asyncio._get_running_loop() is not None:
            self._id, self._around = next(self._writer.ids), _around.get()
            _around.set(self._id)
            self._args |= {} if self._around is None else {"in": self._around}
            self._writer.write(self._event("b"), self._began_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = time.monotonic()
        if self._id is None:
            self._writer.write(self._event("X"), self._began_s, now)
        else:
            _around.set(self._around)
            self._writer.write(self._event("e"), now)

    def _event(self, phase: str) -> dict[str, Any]:
        event = {"ph": phase, "name": self._name, "cat": "arealite", "args": self._args}
        return event if self._id is None else event | {"id2": {"local": hex(self._id)}}


_writer: _Writer | None = None
_lock = threading.Lock()


def start(name: str) -> None:
    """Open the file of this process if its run is traced; the heartbeat does this, under its name."""
    global _writer
    folder = os.environ.get(FOLDER_VARIABLE)
    with _lock:
        if folder and _writer is None:
            try:
                _writer = _Writer(Path(folder), name)
            except OSError as error:
                logger.warning("this process can't be traced in %s: %s", folder, error)


def span(name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
    """Trace the block, with values that JSON can hold."""
    return _OFF if _writer is None else _Span(_writer, name, args)


async def awaited(name: str, awaitable: Awaitable[T], **args: Any) -> T:
    """Await what the span is about."""
    with span(name, **args):
        return await awaitable


def record(name: str, began_s: float, ended_s: float, **args: Any) -> None:
    """Trace what this thread did between two times of the monotonic clock."""
    if _writer is not None:
        _writer.write({"ph": "X", "name": name, "cat": "arealite", "args": args}, began_s, ended_s)


def resume() -> bool:
    """Let all processes write, also after `finish` of an earlier attempt; return whether this run is traced."""
    if _writer is not None:
        (_writer.folder / _ENDED).unlink(missing_ok=True)
    return _writer is not None


def finish(path: Path) -> None:
    """Let no process write any more, and join what they have written at `path`, a `.json.gz`."""
    if _writer is None or (_writer.folder / _ENDED).exists():
        return
    (_writer.folder / _ENDED).touch()
    unfinished = path.with_name(f".{path.name}.unfinished")
    with gzip.open(unfinished, "wb", compresslevel=1) as file:
        before = b'{"traceEvents": [\n'
        for part in sorted(_writer.folder.glob("*.jsonl")):
            with part.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"}\n"):  # the last one of a killed process may be half written
                        file.write(before + line[:-1])
                        before = b",\n"
        file.write(b"\n]}\n")
    unfinished.replace(path)


def _first_told(folder: Path, name: str, value: float) -> float:
    """Return what the first process told under a name, which may be this one."""
    path, ours = folder / f"{name}.clock", folder / f".{name}.{identity(os.getpid())}.clock"
    ours.write_text(repr(value), encoding="ascii")
    with contextlib.suppress(FileExistsError):
        os.link(ours, path)
    ours.unlink()
    return float(path.read_text(encoding="ascii"))

"""The trace of a run for Perfetto: spans of all its processes on one clock, as Chrome's JSON.

A launcher sets the folder in AREALITE_TRACE_DIR; without it nothing is written. Each process appends whole lines to its
own file there, so a killed process loses at most the last line; `join` joins the files. Times are of the monotonic
clock, which the processes of a node share, shifted to the wall clock of the node.

Spans of a thread nest. Spans of an event loop do not: they are asynchronous, with the enclosing span as `in`.
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
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from arealite.utils.processes import identity, machine

FOLDER_VARIABLE = "AREALITE_TRACE_DIR"
MAX_BYTES = 64 << 20  # of one process
_OFF = contextlib.nullcontext()

T = TypeVar("T")
logger = logging.getLogger("arealite.trace")
_around: ContextVar[int | None] = ContextVar("the enclosing asynchronous span", default=None)
phase_observer: ContextVar[Callable[[str, int], None] | None] = ContextVar("observer of phases", default=None)
"""Called with a name and 1 or -1 as a phase begins or ends in this context, or in a task that was started in it."""


class _Writer:
    """Appends events to the file of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ids = itertools.count(1)
        self._offset_s = max(time.time() - time.monotonic() for _ in range(9))  # unless interrupted between both
        self._pid = zlib.crc32(f"{machine()}.{os.getpid()}".encode()) >> 1  # pids of several nodes may be equal
        path = folder / f"{machine()}.{identity(os.getpid())}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._left_bytes = MAX_BYTES
        self._threads: set[int] = set()  # threads whose name is in the file
        shown = f"{name} (pid {os.getpid()}, {os.uname().nodename})"
        self._append({"ph": "M", "name": "process_name", "args": {"name": shown}})

    def write(self, event: dict[str, Any], at_s: float, ended_s: float | None = None) -> None:
        """Append an event with its time, or its begin and end, on the monotonic clock."""
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads.add(thread)
            thread_name = threading.current_thread().name
            self._append({"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": thread_name}})
        event |= {"cat": "arealite", "ts": self._us(at_s), "tid": thread}
        if ended_s is not None:
            event["dur"] = self._us(ended_s) - event["ts"]
        self._append(event)

    def _us(self, at_s: float) -> int:
        """Return whole microseconds, so that nested spans stay nested."""
        return int((at_s + self._offset_s) * 1e6)

    def _append(self, event: dict[str, Any]) -> None:
        if self._left_bytes <= 0:
            return
        line = json.dumps({"pid": self._pid, **event}, default=str).encode() + b"\n"
        try:
            self._left_bytes -= os.write(self._file, line)
        except OSError:
            self._left_bytes = 0
        if self._left_bytes <= 0:
            logger.warning("the trace of this process ends: it has %d MiB, or the disk is full", MAX_BYTES >> 20)


_writer: _Writer | None = None
_lock = threading.Lock()


def start(name: str) -> None:
    """Open the file of this process if its run is traced; the heartbeat calls it with the name of the process."""
    global _writer
    folder = os.environ.get(FOLDER_VARIABLE)
    with _lock:
        if folder and _writer is None:
            try:
                _writer = _Writer(Path(folder), name)
            except OSError as error:
                logger.warning("this process can't be traced in %s: %s", folder, error)


def span(name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
    """Trace the block; `args` are JSON values."""
    return _OFF if _writer is None else _traced(_writer, name, args)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Trace the block, and call the observer of this context as it begins and ends."""
    observe = phase_observer.get() or (lambda name, change: None)
    observe(name, 1)
    try:
        with span(name):
            yield
    finally:
        observe(name, -1)


async def awaited(name: str, awaitable: Awaitable[T], **args: Any) -> T:
    """Await in a span."""
    with span(name, **args):
        return await awaitable


def record(name: str, began_s: float, ended_s: float, **args: Any) -> None:
    """Trace a span of this thread between two times of the monotonic clock."""
    if _writer is not None:
        _writer.write({"ph": "X", "name": name, "args": args}, began_s, ended_s)


def join(path: Path) -> None:
    """Join the files of all processes into `path`, a `.json.gz`."""
    if _writer is None:
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    with gzip.open(unfinished, "wb", compresslevel=1) as file:
        before = b'{"traceEvents": [\n'
        for part in sorted(_writer.folder.glob("*.jsonl")):
            with part.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"}\n"):  # the last line of a killed process may be cut
                        file.write(before + line[:-1])
                        before = b",\n"
        file.write(b"\n]}\n")
    unfinished.replace(path)


@contextlib.contextmanager
def _traced(writer: _Writer, name: str, args: dict[str, Any]) -> Iterator[None]:
    """Write a span when it ends; an asynchronous span also when it begins."""
    began_s, event = time.monotonic(), {"name": name, "args": args}
    if asyncio._get_running_loop() is None:
        try:
            yield
        finally:
            writer.write(event | {"ph": "X"}, began_s, time.monotonic())
        return
    number, around = next(writer.ids), _around.get()
    event["id2"] = {"local": hex(number)}
    if around is not None:
        args["in"] = around
    _around.set(number)
    writer.write(event | {"ph": "b"}, began_s)
    try:
        yield
    finally:
        _around.set(around)
        writer.write(event | {"ph": "e"}, time.monotonic())

"""The heartbeat of a process: a counter of progress and its current waits, published twice a second.

A launcher names the folder in AREALITE_PROGRESS_DIR, without which nothing is written. SIGUSR2 appends the stacks of
all threads to a file beside it, also from inside C code. Invariant: `tick` costs less than 2 us.

A process that can't begin a thread for want of memory is ended: CPython 3.11 would let whoever started it wait forever.
"""

import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from arealite.utils import trace
from arealite.utils.processes import identity, machine

FOLDER_VARIABLE = "AREALITE_PROGRESS_DIR"
NAME_VARIABLE = "AREALITE_PROCESS_NAME"
STACKS_SIGNAL = signal.SIGUSR2
PERIOD_S = 0.5
FILE_BYTES = 1 << 16
_MAX_LOOKS = 20  # at a thread that was started and has not begun
_NO_THREAD = (
    b"memory ran out: a thread was started and lacks the memory to begin, so this process ends; use less, or raise the "
    b"limit of the process (`arealite check` estimates the need)\n"
)

On = Literal["ranks", "rollout", "reward", "servers", "disk"]

logger = logging.getLogger("arealite.progress")
_count = 0
_is_started = False
_lock = threading.Lock()
_waits: dict[int, list[dict[str, Any]]] = {}  # by thread, the innermost last
_reports: dict[str, Callable[[], Any]] = {}
_status: dict[str, Any] = {}


def tick() -> None:
    """Count a piece of progress, from any thread. A count lost to a race of two threads does not matter."""
    global _count
    _count += 1
    if not _is_started:
        start()


@contextmanager
def waiting(what: str, on: On | None = None, *, pid: int | None = None) -> Iterator[None]:
    """Context or decorator that names what this thread waits for; the innermost one counts.

    `pid` is the process it waits for, if any. A wait is no progress by itself.
    """
    if not _is_started:
        start()
    waits = _waits.setdefault(threading.get_ident(), [])
    wait = {"what": what, "on": on, "pid": pid, "since": time.monotonic()}
    waits.append(wait)
    try:
        with trace.span(what):
            yield
    finally:
        waits.remove(wait)


def report(name: str, make: Callable[[], Any]) -> None:
    """Publish the result of `make` as JSON, e.g. queue depths; a thread calls it while there is no progress."""
    _reports[name] = make


def show(**status: Any) -> None:
    """Publish these fields of what a user sees of a run: `step`, `total_steps`, `phase`."""
    _status.update(status)


def withdraw(name: str) -> None:
    _reports.pop(name, None)


def start(name: str | None = None) -> None:
    """Start publishing if a launcher asked for it; the first tick or wait also does this."""
    global _is_started
    with _lock:
        if _is_started:
            return
        _is_started = True
    rank = os.environ.get("RANK")
    name = name or (os.environ.get(NAME_VARIABLE, "process") if rank is None else f"trainer-{rank}")
    trace.start(name)
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    path = Path(folder) / f"{name}.{machine()}.{identity(os.getpid())}.json"
    try:
        answer_stack_requests(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w+b", buffering=0)  # rewritten in place at its final size, so that a full disk can't stop it
        os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
    except OSError as error:
        logger.warning("progress can't be published in %s: %s. Stall reports will have less detail.", folder, error)
        return
    threading.Thread(target=_publish_forever, args=(file, name), name="arealite-heartbeat", daemon=True).start()


def answer_stack_requests(name: str) -> None:
    """Let STACKS_SIGNAL append all stacks to `stacks/<name>.<pid>-<start>.txt`, whose name says that it is harmless."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    path = Path(folder).with_name("stacks") / f"{name}.{identity(os.getpid())}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    unnamed = path.with_suffix(".unfinished")
    file = unnamed.open("ab")
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    unnamed.rename(path)


def _publish_forever(file: IO[bytes], name: str) -> None:
    count, moved = -1, time.monotonic()
    looks: dict[threading.Thread, int] = {}
    while True:
        try:
            looks = {thread: looks.get(thread, 0) + 1 for thread in threading.enumerate() if thread.ident is None}
            if any(num > _MAX_LOOKS for num in looks.values()):
                os.write(2, _NO_THREAD)
                os._exit(1)
            now, last, count = time.monotonic(), count, _count
            moved = now if count != last else moved
            state = {
                "name": name,
                "pid": os.getpid(),
                "count": count,
                "moved": moved,
                "published": now,
                "main_thread": threading.main_thread().ident,
                "waits": _current_waits(),
                "status": dict(_status),
                "reports": {} if count != last else {key: _made(make) for key, make in list(_reports.items())},
            }
            text = json.dumps(state, default=repr).encode()
            if len(text) >= FILE_BYTES:
                text = json.dumps(state | {"reports": {"error": f"{len(text)} bytes are too long"}}).encode()
            os.pwrite(file.fileno(), text.ljust(FILE_BYTES - 1) + b"\n", 0)
        except MemoryError:
            pass  # also this thread must go on: there may be memory at the next look
        except OSError as error:
            logger.warning("progress can't be published in %s: %s", file.name, error)
            time.sleep(60)
        time.sleep(PERIOD_S)


def _current_waits() -> list[dict[str, Any]]:
    """Return the innermost wait of each thread, the main thread's first."""
    main = threading.main_thread().ident
    innermost = [waits[-1] | {"is_main": thread == main} for thread, waits in list(_waits.items()) if waits]
    return sorted(innermost, key=lambda wait: (not wait["is_main"], wait["since"]))


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # it looks at objects that other threads change; the next look is in half a second
        return {"error": repr(error)}

"""The heartbeat of a process: a progress counter and the waits of its threads, published twice a second.

A launcher names the folder in AREALITE_PROGRESS_DIR; without it nothing is published. SIGUSR2 appends the stacks of all
threads to a file there: faulthandler writes it without the GIL and without ptrace, so also from a thread stuck in C
code. Invariant: `tick` costs less than 2 us.
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
from typing import Any, Literal

from arealite.utils import trace
from arealite.utils.files import write_atomically
from arealite.utils.processes import identity, machine

FOLDER_VARIABLE = "AREALITE_PROGRESS_DIR"
NAME_VARIABLE = "AREALITE_PROCESS_NAME"
STACKS_SIGNAL = signal.SIGUSR2
PERIOD_S = 0.5

WaitsOn = Literal["ranks", "rollout", "reward", "servers", "disk"]

logger = logging.getLogger("arealite.progress")
_count = 0
_is_started = False
_lock = threading.Lock()
_waits: dict[int, list[dict[str, Any]]] = {}  # by thread, the innermost last
_reports: dict[str, Callable[[], Any]] = {}


def tick() -> None:
    """Count progress, from any thread; a count lost to a race does not matter."""
    global _count
    _count += 1
    if not _is_started:
        start()


@contextmanager
def waiting(what: str, on: WaitsOn | None = None, *, pid: int | None = None) -> Iterator[None]:
    """Publish and trace a wait of this thread; usable as a decorator. The innermost wait counts.

    `pid` is the process it waits for, if any. A wait does not count as progress.
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


def start(name: str | None = None) -> None:
    """Start publishing if a launcher asked for it; the first tick or wait also starts it."""
    global _is_started
    with _lock:
        if _is_started:
            return
        _is_started = True
    name = name or os.environ.get(NAME_VARIABLE, "process")
    trace.start(name)
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    write_stacks_on_signal(name)
    path = Path(folder) / f"{name}.{machine()}.{identity(os.getpid())}.json"
    threading.Thread(target=_publish_forever, args=(path, name), name="arealite-heartbeat", daemon=True).start()


def write_stacks_on_signal(name: str) -> None:
    """Have STACKS_SIGNAL append the stacks of all threads to `<name>.<pid>-<start>.stacks` in the launcher's folder."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        path = Path(folder) / f"{name}.{identity(os.getpid())}.stacks"
        path.parent.mkdir(parents=True, exist_ok=True)
        faulthandler.register(STACKS_SIGNAL, file=path.open("ab"), all_threads=True)


def _publish_forever(path: Path, name: str) -> None:
    count, moved = -1, time.monotonic()
    while True:
        now, last, count = time.monotonic(), count, _count
        moved = now if count != last else moved
        state = {
            "name": name,
            "pid": os.getpid(),
            "count": count,
            "moved_s": now - moved,
            "published": now,
            "waits": _current_waits(now),
            "reports": {} if count != last else {key: _made(make) for key, make in list(_reports.items())},
        }
        try:
            write_atomically(path, json.dumps(state, default=repr))
        except OSError as error:
            logger.warning("the heartbeat can't be written: %s", error)
            time.sleep(60)
        time.sleep(PERIOD_S)


def _current_waits(now: float) -> list[dict[str, Any]]:
    """Return the innermost wait of each thread, the main thread's first."""
    main = threading.main_thread().ident
    innermost = [(thread == main, waits[-1]) for thread, waits in list(_waits.items()) if waits]
    return [
        {"what": wait["what"], "on": wait["on"], "pid": wait["pid"], "for_s": now - wait["since"], "is_main": is_main}
        for is_main, wait in sorted(innermost, key=lambda item: (not item[0], item[1]["since"]))
    ]


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # other threads change what it reads; it is called again in half a second
        return {"error": repr(error)}

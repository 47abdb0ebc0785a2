"""A process that runs calls of one function, one at a time, and can be killed at any moment.

Rewards, isolated environments and agents run in such processes: a call that hangs in C code, crashes or takes all
memory ends only its own process. A process is started fresh (never forked from one with threads or torch) and imports
only the function's module, or the entry script if the function is defined there; functions defined in a notebook are
sent by value. Calls and replies are pickled: this protects from mistakes, not from hostile code.

Invariants: a process ends when its parent ends, for any reason; `kill` also ends the processes that it has started;
every exchange has a deadline.
"""

import asyncio
import contextlib
import functools
import json
import math
import multiprocessing.spawn
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dill
import psutil

from arealite.utils import heartbeat
from arealite.utils.background import DaemonThreads, in_thread
from arealite.utils.processes import describe_exit, die_with_parent, exit_status, kill_group
from arealite.utils.secret import environment_without_secret

STARTUP_TIMEOUT_S = 60.0
_NO_TIMEOUT_S = 20 * 24 * 3600.0  # for callers that have a deadline of their own
_NO_PROGRESS_S = 60  # deadline for the socket to take in or give out more of a message
_CHECK_S = 0.1  # interval of checks on a running call
_END_S = 10.0  # deadline for the end of a process that was killed or closed its socket
_MAX_TRACEBACK = 20_000  # characters
_GIB = 2**30
_PACKAGE = str(Path(__file__).parents[1]) + "/"
# Until this module is imported, the standard library comes first: the user's folder may hold a json.py of its own.
_BOOTSTRAP = (
    "import json, sys; path = json.loads(sys.argv.pop(1)); sys.path += path; "
    "from arealite.utils.worker_process import main; sys.path[:] = path; main()"
)
_PREPARATION = ("name", "sys_path", "sys_argv", "dir", "orig_dir")
_MAIN = ("init_main_from_name", "init_main_from_path")
_STARTER = DaemonThreads(1, "worker-starter")  # never ends before the process: a child dies with its starting thread

Frame = tuple[str, int, str]  # file, line, function


class CallError(Exception):
    """The function raised, or could not be imported; `frames` of the traceback come innermost first."""

    def __init__(self, text: str, frames: Sequence[Frame]) -> None:
        super().__init__(text)
        self.text = text
        self.frames = frames

    @property
    def summary(self) -> str:
        """The last line of the traceback, e.g. `KeyError: 'left'`."""
        return self.text.strip().rpartition("\n")[2]


class WorkerCrashError(Exception):
    """The process ended during a call, or must be killed because it takes too much memory."""


def pickle_target(
    function: Callable[..., Any], name: str, *, what: str, wrapper: Callable[[Any], Callable[..., Any]] | None = None
) -> bytes:
    """Pickle a function, or `wrapper(function)`, by reference, with the settings that a worker needs to import it.

    In a notebook or at a prompt, `__main__` can't be imported: its functions are pickled by value, with the data and
    functions that they use. Raises ValueError about `what` if the function can't be pickled.
    """
    data = multiprocessing.spawn.get_preparation_data("worker")
    is_interactive = not data.keys() & set(_MAIN) and _is_of_main(function)
    try:
        target = function if wrapper is None else wrapper(function)
        pickled = dill.dumps(target, recurse=True) if is_interactive else pickle.dumps(target)
    except Exception as error:
        cause = re.sub(" at 0x[0-9a-f]+", "", str(error))
        advice = "Let it use data and functions only" if is_interactive else "Define it at module level"
        raise ValueError(
            f"{what} must be importable, because it runs in another process: got {name} ({cause}). "
            f"{advice}, or make it an `async def`."
        ) from error
    keys = _PREPARATION + _MAIN if b"_main__" in pickled else _PREPARATION  # `__mp_main__`, too
    return pickle.dumps(({key: data[key] for key in keys if key in data}, pickled))


def _is_of_main(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) == "__main__"


class WorkerProcess:
    """The parent's side of one process, which imports its function in the background as soon as it is started.

    The process does not get the secret of the run. After `WorkerCrashError` or `TimeoutError` it is no longer usable.
    Used by one thread at a time, except `kill`.
    """

    def __init__(self, target: bytes, *, name: str = "worker", max_growth_gib: float = math.inf) -> None:
        """`target` comes from `pickle_target`; `name` appears in stall reports."""
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _NO_PROGRESS_S, 0))
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), name]
            start = partial(
                subprocess.Popen,
                [sys.executable, "-P", "-c", _BOOTSTRAP, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment_without_secret(),
                process_group=0,  # so that `kill` finds children whose worker has ended
            )
            self.process = _STARTER.submit(start).result(STARTUP_TIMEOUT_S)
        self.is_ready = False
        self._is_idle = True
        self._max_growth_gib = max_growth_gib
        self._first_gib = 0.0
        self._connection = Connection(ours.detach())
        self._replies = select.poll()  # Connection.poll makes a selector for each call
        self._replies.register(self._connection, select.POLLIN)
        with contextlib.suppress(OSError):  # the first call reports it
            self._connection.send_bytes(target)

    @property
    def is_usable(self) -> bool:
        """True if the process lives, its last call has returned or raised, and it has not grown too large."""
        return self._is_idle and self.process.poll() is None and not self._has_grown

    @property
    def growth_gib(self) -> float:
        """Resident memory taken since the import of the function; 0 if the process has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).memory_info().rss / _GIB - self._first_gib
        return 0.0

    @property
    def _has_grown(self) -> bool:
        return self.is_ready and self.growth_gib > self._max_growth_gib

    def call(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """Call the function and return its value. The import of its module does not count against the deadline.

        Raises CallError, WorkerCrashError, or TimeoutError.
        """
        message = pickle.dumps((args, kwargs or {}))
        self._is_idle = False
        try:
            if not self.is_ready:
                self._wait_ready()
            self._connection.send_bytes(message)
            failure, value = self._receive(time.monotonic() + timeout_s)
        except (CallError, WorkerCrashError, TimeoutError):
            raise
        except (EOFError, OSError) as error:
            self.kill()  # one that ends already keeps its status
            raise WorkerCrashError(describe_exit(exit_status(self.process.returncode))) from error
        except Exception as error:  # unpickling may raise anything
            raise WorkerCrashError(f"a reply that can't be read here ({error!r:.200})") from error
        self._is_idle = True
        if failure is not None:
            raise CallError(*failure)
        return value

    async def acall(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call without a deadline of its own: the process is killed if the caller is cancelled."""
        try:
            return await in_thread(partial(self.call, args, kwargs, timeout_s=_NO_TIMEOUT_S))
        except (asyncio.CancelledError, WorkerCrashError):
            await self.akill()
            raise

    async def akill(self) -> None:
        """Kill the process from an event loop and wait for its end, also if the caller is cancelled."""
        await asyncio.shield(in_thread(self.kill))

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self._is_idle = False
        kill_group(self.process.pid, self.process.poll() is None)
        self.process.wait(_END_S)

    def close(self) -> None:
        self.kill()
        self._connection.close()

    def _wait_ready(self) -> None:
        try:
            failure, _ = self._receive(time.monotonic() + STARTUP_TIMEOUT_S)
        except TimeoutError:
            raise WorkerCrashError(f"no import of its module within {STARTUP_TIMEOUT_S:g} s") from None
        if failure is not None:
            raise CallError(*failure)
        self._first_gib = self.growth_gib
        self.is_ready = True

    def _receive(self, deadline: float) -> Any:
        """Wait for a reply. A process may end without closing its socket, if a child has inherited it."""
        left_s = deadline - time.monotonic()
        while not self._replies.poll(1000 * min(_CHECK_S, max(0.0, left_s))):
            if self.process.poll() is not None:
                raise EOFError
            if left_s <= 0:
                raise TimeoutError
            if self._has_grown:
                raise WorkerCrashError(
                    f"{self.growth_gib:.1f} GiB taken in one call, more than {self._max_growth_gib:g}"
                )
            left_s = deadline - time.monotonic()
        return pickle.loads(self._connection.recv_bytes())


class WorkerPool:
    """Processes of one function: `take` returns an idle one or starts one, `give_back` keeps those still usable."""

    def __init__(self, target: bytes, *, name: str, max_growth_gib: float = math.inf) -> None:
        self._new = partial(WorkerProcess, target, name=name, max_growth_gib=max_growth_gib)
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._is_closed = False

    def take(self) -> WorkerProcess:
        """Return the living process that was used last, else a new one."""
        with self._lock:
            self.check_open()
            while self._idle:
                worker = self._idle.pop()
                if worker.is_usable:
                    return worker
                self._all.discard(worker)
                worker.close()
            worker = self._new()
            self._all.add(worker)
            return worker

    def check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"the pool of {self._name} processes must be open: got a call after close(). Make a new workflow, and "
                "close workflows after rollout.destroy(), which ends their episodes."
            )

    def give_back(self, worker: WorkerProcess) -> None:
        """Keep a process for the next call, or kill it."""
        with self._lock:
            if worker.is_usable and not self._is_closed:
                self._idle.append(worker)
                return
            self._all.discard(worker)
        worker.close()

    def close(self) -> None:
        """Kill all processes, also during a call; `give_back` closes the connection that a call still reads."""
        with self._lock:
            self._is_closed, workers = True, list(self._all)
            self._all.clear()
            self._idle.clear()
        for worker in workers:
            worker.kill()


def main() -> None:
    """Serve calls until the parent closes the socket. Arguments: file descriptor of the socket, parent's pid, name."""
    descriptor, parent, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    heartbeat.write_stacks_on_signal(name)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(EOFError, OSError):  # the parent has ended, or the function closed the socket
        _serve(Connection(descriptor))
    os._exit(0)  # threads of the function would delay a normal exit


def _serve(connection: Connection) -> None:
    pid = os.getpid()
    try:
        preparation, pickled = pickle.loads(connection.recv_bytes())
        multiprocessing.spawn.prepare(preparation)
        function = pickle.loads(pickled)
    except BaseException as error:
        connection.send_bytes(pickle.dumps((describe_error(error), None)))
        return
    connection.send_bytes(pickle.dumps((None, None)))
    while True:
        reply = _answer(function, connection.recv_bytes())
        if os.getpid() != pid:
            return  # a fork made by the function also returns from the call
        connection.send_bytes(reply)


def _answer(function: Callable[..., Any], message: bytes) -> bytes:
    try:
        args, kwargs = pickle.loads(message)
        return pickle.dumps((None, function(*args, **kwargs)))
    except BaseException as error:
        return pickle.dumps((describe_error(error), None))


def describe_error(error: BaseException) -> tuple[str, list[Frame]]:
    """Return the text of a traceback without our own first frames, and all its frames, innermost first."""
    below = error.__traceback__
    while below is not None and below.tb_next and below.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        below = below.tb_next
    text, half = "".join(traceback.format_exception(type(error), error, below)), _MAX_TRACEBACK // 2
    text = text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"
    walked = list(traceback.walk_tb(error.__traceback__))[::-1]
    return text, [(frame.f_code.co_filename, line, frame.f_code.co_qualname) for frame, line in walked]

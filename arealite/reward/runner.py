"""Runs a reward function off the event loop, with a deadline, and never turns a failure into a number.

Coroutine functions are awaited on the event loop. Plain functions run in worker processes, which can be killed when a
call hangs, even inside C code; a spare one is ready to replace a worker. Workers are started afresh (never forked from
a process that has torch) and import the module of the function only, or the entry script if it is defined there; they
are sent what was typed into a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import math
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dill
import psutil

from arealite.api.errors import RewardError
from arealite.api.reward_api import RewardFunction
from arealite.api.source_lines import line_of
from arealite.reward.worker import Reply, checked, explained
from arealite.utils import heartbeat
from arealite.utils.activity import doing
from arealite.utils.environment import SECRET_VARIABLE
from arealite.utils.processes import describe_exit, exit_status, kill_tree

logger = logging.getLogger("arealite.reward")

STARTUP_TIMEOUT_S = 60.0
_CHECK_S = 0.1  # interval of checks on a running call
_END_S = 10.0  # deadline for the end of a process that was killed or closed its socket
_MAX_REPLY_BYTES = 2**20
_EXPLAINED = ("exception", "contract")  # kinds of replies whose value is text
_FOREIGN_REPLY = "an answer to another call or to none: the function, or a process that it has started, wrote it"
_GIB = 2**30
# Until the worker is imported, the standard library comes first: the user's folder may hold a json.py of its own.
_BOOTSTRAP = (
    "import json, sys; path = json.loads(sys.argv.pop(1)); sys.path += path; "
    "from arealite.reward.worker import main; sys.path[:] = path"
)
_PREPARATION = ("name", "sys_path", "sys_argv", "dir", "orig_dir")
_MAIN = ("init_main_from_name", "init_main_from_path")


class RewardRunner:
    """Calls `reward_fn` with keywords and returns a finite float or raises RewardError.

    Workers start with the first calls, at most `num_workers` and a spare one; `timeout` counts from when a worker takes
    the call. A worker that grows by more than `max_growth_gib` is replaced.
    """

    def __init__(
        self, reward_fn: RewardFunction, timeout: float = 15.0, num_workers: int = 2, max_growth_gib: float = 2.0
    ) -> None:
        if timeout <= 0 or num_workers < 1 or max_growth_gib <= 0:
            raise ValueError(
                "a reward's timeout, workers and memory must be positive: got "
                f"{timeout} s, {num_workers} and {max_growth_gib} GiB. Use 15 s, 2 and 2 GiB."
            )
        self.reward_fn = reward_fn
        self.name = getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)
        self.timeout = timeout
        self.max_growth_gib = max_growth_gib
        called = getattr(reward_fn, "__call__", None)  # noqa: B004
        code = getattr(inspect.unwrap(reward_fn), "__code__", None)
        self._place = "" if code is None else str(line_of(code, None))
        self.is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(called)
        if not self.is_async:
            self._start_message = start_message(
                reward_fn, f"{self.name} at {self._place}" if self._place else self.name
            )
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._lock = threading.RLock()
        self._workers: set[WorkerProcess] = set()  # all of them
        self._idle: deque[WorkerProcess] = deque()  # a spare one first, which imports the function while others work
        self._is_closed = False

    async def __call__(self, **call: Any) -> float:
        if self._is_closed:
            raise RuntimeError(
                f"reward runner of {self.name} must be open: got a call after close(). Make a new one, or close "
                "workflows after rollout.destroy(), which ends their episodes."
            )
        kind: Any
        with doing("reward"):
            if self.is_async:
                kind, value = await self._await(call)
            else:
                kind, value = await asyncio.wrap_future(self._threads.submit(self._run_in_worker, call))
        if kind == "ok":
            return float(value)
        place = ""
        if kind == "timeout":
            value = f"must return within {self.timeout:g} s: got no result. Make it faster or raise reward_timeout."
        elif kind == "exception":
            place, _, value = value.partition("\n")
            _, _, last = value.strip().rpartition("\n")
            value = f"must not raise: got {last}\n{value}"
        elif kind == "crash":
            value = f"must run in a healthy process: got {value}."
        raise RewardError(f"reward function {self.name} {value}", kind=kind, place=place or self._place)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        if not self.is_async:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()

    async def _await(self, call: dict[str, Any]) -> Reply:
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                return checked(await self.reward_fn(**call))  # type: ignore[misc]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust or a GeneratorExit is no Exception
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0:
                raise
            if deadline.expired():
                return "timeout", None
            return "exception", explained(error)

    def _run_in_worker(self, call: dict[str, Any]) -> Reply:
        worker = self._take()
        if worker is None:
            return "crash", "the end of its runner"
        if not worker.is_ready:
            what = f"a worker of reward function {self.name} to start"
            with heartbeat.waiting(what, on="reward", pid=worker.process.pid):
                kind, value = worker.wait_ready()
            heartbeat.tick()
            if kind != "ready":
                self._discard(worker)
                return kind, value
            with self._lock:
                if all(one.is_ready for one in self._idle) and (spare := self._new_worker()):
                    self._idle.appendleft(spare)
        with heartbeat.waiting(f"reward function {self.name}", on="reward", pid=worker.process.pid):
            kind, value = worker.call(call, self.timeout)
        heartbeat.tick()
        if kind in ("timeout", "crash"):
            self._discard(worker)
        elif worker.growth_gib > self.max_growth_gib:
            message = "replacing a worker of reward %s: it grew by %.1f GiB, more than %g"
            logger.info(message, self.name, worker.growth_gib, self.max_growth_gib)
            self._discard(worker)
        else:
            with self._lock:
                self._idle.append(worker)
        return kind, value

    def _take(self) -> WorkerProcess | None:
        """Return the worker that was used last, else the spare one, else a new one; None when closed."""
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                self._discard(worker)
            return self._new_worker()

    def _discard(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()

    def _new_worker(self) -> WorkerProcess | None:
        """Start a worker unless closed; the caller holds the lock."""
        if self._is_closed:
            return None
        worker = WorkerProcess(self._start_message, self.max_growth_gib)
        self._workers.add(worker)
        return worker


def start_message(function: Callable[..., Any], name: str, *, what: str = "reward_fn") -> bytes:
    """Pickle a function by reference, with what a worker needs to know of this process to import it.

    What was typed into a notebook or at a prompt is in no file to import: it goes by value, with the data and functions
    that it uses. Raises ValueError, about `what`, if no other process can have it.
    """
    data = multiprocessing.spawn.get_preparation_data("reward")
    is_typed = not data.keys() & set(_MAIN) and _is_of_main(function)
    try:
        pickled = dill.dumps(function, recurse=True) if is_typed else pickle.dumps(function)
    except Exception as error:
        advice = "Let it use data and functions only" if is_typed else "Define it at module level"
        raise ValueError(
            f"{what} must be importable, because it runs in another process: got {name} ({error}). "
            f"{advice}, or make it an `async def`."
        ) from error
    keys = _PREPARATION + _MAIN if b"__main__" in pickled else _PREPARATION
    return pickle.dumps(({key: data[key] for key in keys if key in data}, pickled))


def _is_of_main(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) == "__main__"


class WorkerProcess:
    """The parent's side of one worker, which imports the function at once, in the background.

    Every exchange ends by its deadline, whatever the process does: it may hang in C code, be stopped, die, take all
    memory, or answer what nobody asked. It may run what a model wrote, so it is not told the secret of the run, and
    nothing that it sends is unpickled. After `timeout` or `crash` it must be killed. Used by one thread at a time,
    except `kill`.
    """

    def __init__(self, start_message: bytes, max_growth_gib: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = b""
        self._num_calls = 0
        self._max_growth_gib = max_growth_gib
        self._first_gib = 0.0
        self.is_ready = False
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{_BOOTSTRAP}; main()", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE},
                process_group=0,  # by which `kill` finds children whose worker has ended
            )
        self._ready_by = time.monotonic() + STARTUP_TIMEOUT_S
        with contextlib.suppress(OSError):  # `wait_ready` reports it
            self._send(start_message, self._ready_by)

    def wait_ready(self) -> Reply:
        kind, value = self._receive(self._ready_by)
        self.is_ready, self._first_gib = kind == "ready", self.growth_gib  # so far from 0
        if kind == "timeout":
            return "crash", f"no worker that was ready within {STARTUP_TIMEOUT_S:g} s: its module imports slowly"
        return kind, value

    def call(self, call: dict[str, Any], timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        try:
            message = pickle.dumps(pickle.dumps(call))  # the outer one can be read without the classes of the inner one
        except Exception:
            return "exception", "\n" + traceback.format_exc()
        self._num_calls += 1
        try:
            self._send(message, deadline)
        except TimeoutError:
            return "timeout", None
        except OSError:
            return "crash", self._end()
        return self._receive(deadline)

    @property
    def growth_gib(self) -> float:
        """Resident memory that it took since it was ready; 0 when it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).memory_info().rss / _GIB - self._first_gib
        return 0.0

    def kill(self) -> None:
        """End the process at once, with what the reward function may have started."""
        if self.process.poll() is None:
            kill_tree(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_S)

    def close(self) -> None:
        self.kill()
        self._socket.close()

    def _send(self, message: bytes, deadline: float) -> None:
        """Send a message; raise TimeoutError if the process does not read it by the deadline."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(message)

    def _receive(self, deadline: float) -> Reply:
        is_late = False
        while b"\n" not in self._received:
            if is_late:
                return "timeout", None
            left_s = deadline - time.monotonic()
            is_late = left_s <= 0  # what came before the deadline is read also after it
            try:
                self._socket.settimeout(min(_CHECK_S, max(0.001, left_s)))
                received = self._socket.recv(_MAX_REPLY_BYTES)
            except TimeoutError:
                if self.process.poll() is not None:  # what it has started may keep the socket open
                    return "crash", self._end()
                if self.is_ready and self.growth_gib > self._max_growth_gib:
                    return "crash", f"{self.growth_gib:.1f} GiB taken in one call, more than {self._max_growth_gib:g}"
                continue
            except OSError:
                received = b""
            if not received:
                return "crash", self._end()
            self._received += received
            if len(self._received) > _MAX_REPLY_BYTES:
                return "crash", _FOREIGN_REPLY
        line, _, self._received = self._received.partition(b"\n")
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # it may be anything
            number, kind, value = json.loads(line)
            is_number = kind == "ok" and isinstance(value, float) and math.isfinite(value)
            is_good = is_number if self._num_calls else kind == "ready"
            if number == self._num_calls and (is_good or (kind in _EXPLAINED and isinstance(value, str))):
                return kind, value
        return "crash", _FOREIGN_REPLY

    def _end(self) -> str:
        try:
            return describe_exit(exit_status(self.process.wait(_END_S)))
        except subprocess.TimeoutExpired:
            return "a socket that was closed"

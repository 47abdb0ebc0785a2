"""Runs a reward function off the event loop, with a deadline, and never turns a failure into a number.

Plain functions run in worker processes, which are started afresh (never forked from a process that has torch), so that
a call that hangs, even inside C code, can be killed: its worker is replaced and the others don't notice. Coroutine
functions are awaited on the event loop. A worker imports the module of the function and nothing else; the entry script
only when the function is defined in it (it then needs the usual `if __name__ == "__main__":`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from arealite.api.errors import RewardError
from arealite.api.reward_api import RewardFunction
from arealite.reward.worker import Reply, checked
from arealite.utils.processes import describe_exit, exit_status, kill_tree

STARTUP_TIMEOUT_S = 60.0
_PREPARATION = ("name", "sys_path", "sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")


class RewardRunner:
    """Calls `reward_fn` with keywords and returns a finite float or raises RewardError.

    Workers start with the first calls, at most `num_workers`; `timeout` counts from when one takes up the call.
    """

    def __init__(self, reward_fn: RewardFunction, timeout: float = 15.0, num_workers: int = 1) -> None:
        if timeout <= 0 or num_workers < 1:
            raise ValueError(
                f"reward timeout and workers must be positive: got {timeout} s and {num_workers}. Use 15 s and 1."
            )
        self.reward_fn = reward_fn
        self.name = getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)
        self.timeout = timeout
        self.is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(
            getattr(reward_fn, "__call__", None)  # noqa: B004
        )
        if not self.is_async:
            self._start_message = _start_message(reward_fn, self.name)
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._is_closed = False

    async def __call__(self, **call: Any) -> float:
        """Score one completion."""
        if self._is_closed:
            raise RuntimeError(f"reward runner of {self.name} must be open: got a call after close(). Make a new one.")
        if self.is_async:
            kind, value = await self._await(call)
        else:
            kind, value = await asyncio.wrap_future(self._threads.submit(self._run_in_worker, call))
        if kind != "ok":
            self._fail(kind, value)
        return float(value)

    def close(self) -> None:
        """End all workers, also those in the middle of a call."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        if not self.is_async:
            self._threads.shutdown(wait=True, cancel_futures=True)

    async def _await(self, call: dict[str, Any]) -> Reply:
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                return checked(await self.reward_fn(**call))  # type: ignore[misc]
        except Exception:
            if deadline.expired():
                return "timeout", None
            return "exception", traceback.format_exc()

    def _run_in_worker(self, call: dict[str, Any]) -> Reply:
        """Run a call in the worker of this thread, starting one if there is none (left)."""
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            with self._lock:
                if self._is_closed:
                    return "crash", "the reward runner was closed"
                worker = self._of_thread.worker = _Worker()
                self._workers.add(worker)
            kind, value = worker.start(self._start_message)
            if kind != "ready":
                self._discard(worker)
                return kind, value
        kind, value = worker.call(call, self.timeout)
        if kind in ("timeout", "crash"):
            self._discard(worker)
        return kind, value

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        self._of_thread.worker = None
        with self._lock:
            self._workers.discard(worker)

    def _fail(self, kind: Any, detail: Any) -> NoReturn:
        if kind == "timeout":
            detail = f"must return within {self.timeout:g} s: got no answer. Make it faster or raise reward_timeout."
        elif kind == "exception":
            detail = f"must not raise: got {detail.strip().splitlines()[-1]}\n{detail}"
        elif kind == "crash":
            detail = f"must not end its process: got {detail}."
        raise RewardError(f"reward function {self.name} {detail}", kind=kind)


class _Worker:
    """One worker process and the socket to it; used by one thread, except `kill`."""

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        bootstrap = (
            "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from arealite.reward.worker import main"
        )
        command = [sys.executable, "-c", f"{bootstrap}; main()", json.dumps(sys.path)]
        descriptor = theirs.fileno()
        self.process = subprocess.Popen(
            [*command, str(descriptor), str(os.getpid())], pass_fds=[descriptor], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def start(self, message: tuple[dict[str, Any], bytes]) -> Reply:
        """Hand the function over and wait until it is imported."""
        kind, value = self._exchange(pickle.dumps(message), STARTUP_TIMEOUT_S)
        if kind == "timeout":
            return (
                "crash",
                f"a worker that was not ready after {STARTUP_TIMEOUT_S:g} s: its module takes long to import",
            )
        return kind, value

    def call(self, call: dict[str, Any], timeout: float) -> Reply:
        """Run the function."""
        try:
            message = pickle.dumps(call)
        except Exception:
            return "exception", traceback.format_exc()
        return self._exchange(message, timeout)

    def kill(self) -> None:
        """End the process at once, with what the reward function may have started."""
        if self.process.poll() is None:
            kill_tree(self.process.pid)
        self.process.wait()

    def _exchange(self, message: bytes, timeout: float) -> Reply:
        try:
            self.connection.send_bytes(message)
            if not self.connection.poll(timeout):
                return "timeout", None
            reply: Reply = self.connection.recv()
            return reply
        except (EOFError, OSError):
            return "crash", describe_exit(exit_status(self.process.wait()))


def _start_message(reward_fn: RewardFunction, name: str) -> tuple[dict[str, Any], bytes]:
    """Pickle the function by reference, with what a worker must know of this process to resolve it."""
    try:
        pickled = pickle.dumps(reward_fn)
    except Exception as error:
        raise ValueError(
            f"reward_fn must be importable, because it runs in another process: got {name} ({error}). "
            "Define it at module level, or make it an `async def`."
        ) from error
    data = multiprocessing.spawn.get_preparation_data("reward")
    preparation = {key: data[key] for key in _PREPARATION if key in data}
    has_script = any(key.startswith("init_main") for key in preparation)
    if b"__main__" not in pickled:
        preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
    elif not has_script:
        raise ValueError(
            f"reward_fn must be defined in a file: got {name}, typed at a prompt or a notebook. Put it into a module."
        )
    return preparation, pickled

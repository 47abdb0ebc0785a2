"""Runs a reward function off the event loop, with a deadline, and never turns a failure into a number.

Coroutine functions are awaited on the event loop. Plain functions run in worker processes, which can be killed when a
call hangs, even inside C code; a spare one is ready to replace a worker that hung, died or took too much memory.
Workers are started afresh (never forked from a process that has torch) and import the module of the function only, or
the entry script if the function is defined in it (which then needs the usual `if __name__ == "__main__":`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing.spawn
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from arealite.api.errors import RewardError
from arealite.api.reward_api import RewardFunction
from arealite.reward.worker import Reply, checked
from arealite.reward.worker_process import WorkerProcess
from arealite.utils import heartbeat

logger = logging.getLogger("arealite.reward")

_PREPARATION = ("name", "sys_path", "sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")


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
        self.is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(
            getattr(reward_fn, "__call__", None)  # noqa: B004
        )
        if not self.is_async:
            self._start_message = _start_message(reward_fn, self.name)
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()  # all workers, the spare one too
        self._spare: WorkerProcess | None = None  # imports the function while others work
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
        for worker in workers:
            worker.close()

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
        """Run a call in the worker of this thread, or in a new one."""
        worker: WorkerProcess | None = getattr(self._of_thread, "worker", None)
        if worker is None:
            worker = self._take_spare()
            if worker is None:
                return "crash", "the end of its runner"
            what = f"a worker of reward function {self.name} to start"
            with heartbeat.waiting(what, on="reward", pid=worker.process.pid):
                kind, value = worker.wait_ready()
            heartbeat.tick()
            if kind != "ready":
                self._discard(worker)
                return kind, value
            self._of_thread.worker = worker
            with self._lock:
                self._spare = self._spare or self._new_worker()
        with heartbeat.waiting(f"reward function {self.name}", on="reward", pid=worker.process.pid):
            kind, value = worker.call(call, self.timeout)
        heartbeat.tick()
        if kind in ("timeout", "crash"):
            self._discard(worker)
        elif worker.is_too_big:
            message = "replacing a worker of reward %s: it grew by %.1f GiB, more than %g"
            logger.info(message, self.name, worker.growth_gib, self.max_growth_gib)
            self._discard(worker)
        return kind, value

    def _take_spare(self) -> WorkerProcess | None:
        """Return the spare worker, or a new one if there is none alive; None when closed."""
        with self._lock:
            worker, self._spare = self._spare, None
            if worker is not None and worker.process.poll() is not None:
                self._workers.discard(worker)
                worker.close()
                worker = None
            return worker or self._new_worker()

    def _new_worker(self) -> WorkerProcess | None:
        """Start a worker unless closed; the caller holds the lock."""
        if self._is_closed:
            return None
        worker = WorkerProcess(self._start_message, self.max_growth_gib)
        self._workers.add(worker)
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
        self._of_thread.worker = None
        with self._lock:
            self._workers.discard(worker)
        worker.close()

    def _fail(self, kind: Any, detail: Any) -> NoReturn:
        if kind == "timeout":
            detail = f"must return within {self.timeout:g} s: got no result. Make it faster or raise reward_timeout."
        elif kind == "exception":
            detail = f"must not raise: got {detail.strip().splitlines()[-1]}\n{detail}"
        elif kind == "crash":
            detail = f"must run in a healthy process: got {detail}."
        raise RewardError(f"reward function {self.name} {detail}", kind=kind)


def _start_message(reward_fn: RewardFunction, name: str) -> bytes:
    """Pickle the function by reference, with what a worker needs to know of this process to import it."""
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
    return pickle.dumps((preparation, pickled))

"""Runs a reward function off the event loop, with a deadline, and never turns a failure into a number.

Coroutine functions are awaited on the event loop; plain functions run in processes, see `utils/worker_process.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arealite.api.errors import RewardError
from arealite.api.reward_api import RewardFunction
from arealite.api.script import SourceLine, line_of, users_line
from arealite.utils import heartbeat, trace
from arealite.utils.worker_process import CallError, WorkerCrashError, WorkerPool, describe_error, pickle_target

Result = tuple[str, Any]  # `("ok", number)`, or `("contract", message)`


class RewardRunner:
    """Calls `reward_fn` with keywords and returns a finite float or raises RewardError.

    Processes start with the first calls, at most `num_workers`; `timeout` counts from when a process takes the call. A
    process that grows by more than `max_growth_gib` is replaced.
    """

    def __init__(
        self, reward_fn: RewardFunction, timeout: float = 15.0, num_workers: int = 2, max_growth_gib: float = 2.0
    ) -> None:
        self.reward_fn = reward_fn
        self.name = getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)
        self.timeout = timeout
        called = getattr(reward_fn, "__call__", None)  # noqa: B004
        code = getattr(inspect.unwrap(reward_fn), "__code__", None)
        self._place = "" if code is None else str(line_of(code, None))
        self.is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(called)
        if not self.is_async:
            name = f"{self.name} at {self._place}" if self._place else self.name
            target = pickle_target(reward_fn, name, what="reward_fn")
            self._pool = WorkerPool(target, name="reward-worker", max_growth_gib=max_growth_gib)
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    async def __call__(self, **call: Any) -> float:
        if not self.is_async:
            self._pool.check_open()
        with trace.phase("reward"):
            try:
                if self.is_async:
                    kind, value = await self._await(call)
                else:
                    kind, value = await asyncio.wrap_future(self._threads.submit(self._run_in_process, call))
            except TimeoutError:
                advice = "Make it faster or raise reward_timeout."
                message = f"must return within {self.timeout:g} s: got no result. {advice}"
                raise self._error("timeout", message) from None
            except WorkerCrashError as error:
                raise self._error("crash", f"must run in a healthy process: got {error}.") from None
            except CallError as error:
                place = users_line(SourceLine(*frame) for frame in error.frames)
                message = f"must not raise: got {error.summary}\n{error.text}"
                raise self._error("exception", message, str(place or "")) from None
        if kind != "ok":
            raise self._error(kind, value)
        return float(value)

    def close(self) -> None:
        """End all processes; calls that run fail."""
        if not self.is_async:
            self._pool.close()
            self._threads.shutdown(wait=True)

    async def _await(self, call: dict[str, Any]) -> Result:
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                return checked(await self.reward_fn(**call))  # type: ignore[misc]
        except BaseException as error:  # not Exception: panics of Rust, SystemExit
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0:
                raise
            if deadline.expired():
                raise TimeoutError from None
            raise CallError(*describe_error(error)) from None

    def _run_in_process(self, call: dict[str, Any]) -> Result:
        worker = self._pool.take()
        try:
            with heartbeat.waiting(f"reward function {self.name}", on="reward", pid=worker.process.pid):
                return checked(worker.call(kwargs=call, timeout_s=self.timeout))
        finally:
            heartbeat.tick()
            self._pool.give_back(worker)

    def _error(self, kind: Any, message: str, place: str = "") -> RewardError:
        return RewardError(f"reward function {self.name} {message}", kind=kind, place=place or self._place)


def checked(value: Any) -> Result:
    """Accept a finite real number (also of numpy or a tensor with one element)."""
    if not hasattr(type(value), "__float__"):
        is_list = isinstance(value, list | tuple)
        advice = "Score one completion, not a list as in TRL" if is_list else "Return a float"
        return "contract", f"reward must be a number: got {value!r:.200}. {advice}."
    try:
        number = float(value)
    except Exception as error:  # RuntimeError of a tensor with several elements
        return "contract", f"reward must be one number: got {value!r:.200} ({error}). Return a float."
    if not math.isfinite(number):
        return "contract", f"reward must be finite: got {number}. Return a finite float."
    return "ok", number

"""Tasks that run at once, and background tasks of one owner in one event loop.

Invariant: no task dies silently. A failure is logged when it happens and raised by the owner's next `check`. Only the
message of an error is logged: asyncio would report a forgotten task by its repr, and that of an HTTP error shows the
headers of the request, and with them the secret of the run.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gathered(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run at once, each in a task; the first error cancels the others."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class BackgroundTasks:
    """Keeps the tasks that it starts; `what` names them in messages, `on_failure` wakes the owner."""

    def __init__(self, what: str, logger: logging.Logger, on_failure: Callable[[], None] | None = None) -> None:
        self.error: BaseException | None = None  # the first one
        self._what = what
        self._logger = logger
        self._on_failure = on_failure
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, coroutine: Coroutine[Any, Any, None], key: Hashable = None) -> asyncio.Task[None]:
        """Start a task, unless one with this key runs, and return the one that runs; without a key, any number may."""
        key = object() if key is None else key
        if key in self._tasks and not self._tasks[key].done():
            coroutine.close()
            return self._tasks[key]
        task = self._tasks[key] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda task: self._end(key, task))
        return task

    def check(self) -> None:
        """Raise if a task has failed."""
        if self.error is not None:
            message = f"{self._what} must not fail: got {type(self.error).__name__}: {self.error}. See the log."
            raise RuntimeError(message) from self.error

    async def close(self) -> None:
        """Cancel what runs, and wait for it to end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, key: Hashable, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:  # the next one with its key may have started before this callback
            del self._tasks[key]
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._logger.error("%s failed", self._what, exc_info=error)
        self.error = error if self.error is None else self.error
        if self._on_failure is not None:
            self._on_failure()

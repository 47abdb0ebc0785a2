"""Environments in processes of their own, so that a crash or a hang ends no more than one of them.

A process makes an environment for one run at a time and is kept for the next one. One that has failed, or whose call
was given up, is killed with everything that it started. Objects cross by pickle: this protects from mistakes of an
environment, not from hostile code.
"""

import contextlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from arealite.api.errors import EnvError
from arealite.utils.environment import SECRET_VARIABLE
from arealite.utils.processes import descendants, describe_exit, exit_status, kill_tree
from arealite.utils.threads import in_thread

_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with threads may deadlock
_END_S = 10.0


class EnvProcesses:
    """The processes of a workflow's environments. `make_env` must be importable by name."""

    def __init__(self, make_env: Callable[[dict[str, Any]], Any]) -> None:
        self._make_env = make_env
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    async def make(self, data: dict[str, Any]) -> "IsolatedEnv":
        """Return an environment for a row, in an idle process or a new one."""
        while (process := self._take()) is None or not process.is_sound:
            if process is not None:
                await in_thread(self._take_back, process)  # it has died since
            else:
                await in_thread(self._start)  # idle at first, so that it is not lost if nobody waits for it any more
        env = IsolatedEnv(process, self._take_back)
        try:
            await env.call("make", data)
        except BaseException:
            await env.aclose()
            raise
        return env

    def close(self) -> None:
        with self._lock:
            self._is_closed, processes, self._all, self._idle = True, list(self._all), set(), []
        for process in processes:
            process.kill()

    def _take(self) -> "_Process | None":
        with self._lock:
            if self._is_closed:
                raise EnvError("environments must be open: got a call after close(). Make a new workflow.")
            return self._idle.pop() if self._idle else None

    def _start(self) -> None:
        self._take_back(_Process(self._make_env))

    def _take_back(self, process: "_Process") -> None:
        with self._lock:
            if process.is_sound and not self._is_closed:
                self._all.add(process)
                self._idle.append(process)
                return
            self._all.discard(process)
        process.kill()


class IsolatedEnv:
    """An environment in a process, with the methods of an asynchronous one."""

    def __init__(self, process: "_Process", take_back: Callable[["_Process"], None]) -> None:
        self._process, self._take_back = process, take_back

    async def areset(self, **kwargs: Any) -> Any:
        return await self.call("reset", **kwargs)

    async def astep(self, action: Any) -> Any:
        return await self.call("step", action)

    async def aclose(self) -> None:
        try:
            if self._process.is_sound:
                await self.call("close")
        finally:
            await in_thread(self._take_back, self._process)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method. One that fails, or is given up as after its deadline, ends the process."""
        try:
            return await in_thread(self._process.call, name, args, kwargs)
        except BaseException:
            self._process.give_up()
            raise


class _Process:
    def __init__(self, make_env: Callable[[dict[str, Any]], Any]) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, make_env), daemon=True, name="environment")
        self._process.start()
        self._pid = self._process.pid or 0
        theirs.close()
        self._is_given_up = False
        self._descendants: list[int] = []

    @property
    def is_sound(self) -> bool:
        return not self._is_given_up and self._process.is_alive()

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._connection.send((name, args, kwargs))
            error, value = self._connection.recv()
        except (EOFError, OSError) as lost:
            self._process.join(_END_S)
            how = describe_exit(exit_status(self._process.exitcode or 0))
            raise EnvError(f"the process of an environment must live until {name} returns: got {how}.") from lost
        if error is not None:
            raise EnvError(f"{name} of the environment must not raise: got {error}")
        return value

    def give_up(self) -> None:
        """End the process without waiting for that; `kill` ends what it has started."""
        self._is_given_up = True
        self._descendants = descendants(self._pid)
        self._process.kill()

    def kill(self) -> None:
        self._is_given_up = True
        for pid in (self._pid, *self._descendants):
            kill_tree(pid)
        self._process.join(_END_S)
        self._connection.close()


def _serve(connection: Connection, make_env: Callable[[dict[str, Any]], Any]) -> None:
    """Answer calls until the other side is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop(SECRET_VARIABLE, None)
    env: Any = None
    with contextlib.suppress(EOFError, ConnectionError):  # reset, where the parent has ended with an answer unread
        while True:
            name, args, kwargs = connection.recv()
            try:
                if name == "make":
                    env, value = make_env(*args), None
                else:
                    value = getattr(env, name)(*args, **kwargs)
                connection.send((None, value))
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1]
                connection.send((f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})", None))


def _end_with_parent() -> None:
    """End this process when its parent has ended; the kernel could only watch the thread that has started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a child"
    wait([parent.sentinel])
    os._exit(1)

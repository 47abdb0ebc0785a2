"""Environments in processes of their own, so that a crash or a hang ends no more than one of them.

A process makes an environment for one run at a time and is kept for the next run, see `utils/worker_process.py`. The
processes import this module, so it must not import torch.
"""

from collections.abc import Callable
from typing import Any

from arealite.api.errors import EnvError
from arealite.utils.worker_process import CallError, WorkerCrashError, WorkerPool, pickle_target

MakeEnv = Callable[[dict[str, Any]], Any]


def env_pool(make_env: MakeEnv) -> WorkerPool:
    """Return the processes of a workflow's environments. ValueError if `make_env` can't be imported by them."""
    name = getattr(make_env, "__qualname__", type(make_env).__qualname__)
    return WorkerPool(pickle_target(make_env, name, what="make_env", wrapper=_EnvMethods), name="environment")


class IsolatedEnv:
    """An environment in a process, with the methods of an asynchronous one."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self._worker = pool, pool.take()

    @classmethod
    async def make(cls, pool: WorkerPool, data: dict[str, Any]) -> "IsolatedEnv":
        """Make the environment of a row."""
        env = cls(pool)
        try:
            await env._call("make", data)
        except BaseException:
            pool.give_back(env._worker)
            raise
        return env

    async def areset(self, **kwargs: Any) -> Any:
        return await self._call("reset", **kwargs)

    async def astep(self, action: Any) -> Any:
        return await self._call("step", action)

    async def aclose(self) -> None:
        try:
            if self._worker.is_usable:
                await self._call("close")
        finally:
            self._pool.give_back(self._worker)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method. If it raises, or the caller is cancelled, as after its deadline, the process ends."""
        try:
            return await self._worker.acall((name, *args), kwargs)
        except WorkerCrashError as error:
            raise EnvError(f"the process of an environment must live until {name} returns: got {error}.") from error
        except CallError as error:
            await self._worker.akill()
            file, line, _ = error.frames[0]
            raise EnvError(f"{name} of the environment must not raise: got {error.summary} ({file}:{line})") from error


class _EnvMethods:
    """Makes an environment, and calls its methods by name, in its process."""

    def __init__(self, make_env: MakeEnv) -> None:
        self._make_env = make_env
        self._env: Any = None

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name != "make":
            return getattr(self._env, name)(*args, **kwargs)
        self._env = self._make_env(*args)
        return None

"""The registry of a run in a thread of its own, as a launcher keeps it, and servers that register there at will."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from arealite.inference.registry import Registry, ServerEntry
from arealite.utils.network import LOOPBACK

RUN = {"experiment_name": "exp", "trial_name": "t"}
T = TypeVar("T")


class RunningRegistry:
    """A registry that listens until it is closed."""

    def __init__(self, secret: str | None = None, file: Path | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._secret, self._file = secret, file
        self.restart()

    @property
    def address(self) -> str:
        return self.registry.address

    @property
    def servers(self) -> dict[str, ServerEntry]:
        """Entries by name."""
        return self.call(lambda: {one.name: one for one in self.registry.servers.values()})

    def put(self, name: str, address: str, life: int = 1, backend: str = "lite") -> None:
        """Write the entry of a server; another `life` is a server that has started anew."""
        self.wait(self.registry.put(ServerEntry(name, address, backend, incarnation=f"{name}-{life}")))

    def drop(self, name: str) -> None:
        """Delete the entry of a server."""
        self.call(lambda: self.registry.remove_named(name))

    def wait_for(
        self, is_so: Callable[[dict[str, ServerEntry]], bool], timeout_s: float = 60.0
    ) -> dict[str, ServerEntry]:
        """Wait until the servers are as they should be, and return them."""

        async def wait() -> dict[str, ServerEntry]:
            async with asyncio.timeout(timeout_s):
                view = await self.registry.watch()
                while not is_so(servers := {one.name: one for one in view.servers.values()}):
                    view = await self.registry.watch(view.moment)
            return servers

        return self.wait(wait())

    def stop(self) -> None:
        """Stop listening, as at the end of a run."""
        self.wait(self.registry.close())

    def restart(self, host: str = LOOPBACK) -> None:
        """Listen again, empty and at another port."""
        self.registry = self.call(lambda: Registry(self._secret))
        self.wait(self.registry.start(host, self._file))

    def close(self) -> None:
        """End it for good."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the registry's loop."""

        async def call() -> T:
            return function()

        return self.wait(call())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the registry's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

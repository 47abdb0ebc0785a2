"""The registry of a run in a thread of its own, as a launcher keeps it, and servers that register there at will."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from arealite.utils.network import LOOPBACK
from arealite.utils.registry import Claim, Registry, ServerRecord

RUN = {"experiment_name": "exp", "trial_name": "t"}
T = TypeVar("T")


class RunningRegistry:
    """A registry that listens until it is closed."""

    def __init__(self, secret: str | None = None, file: Path | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._numbers = itertools.count()
        self._secret, self._file = secret, file
        self.restart()

    @property
    def address(self) -> str:
        return self.registry.address

    @property
    def servers(self) -> dict[str, ServerRecord]:
        return self.call(lambda: dict(self.registry.servers))

    def put(self, name: str, address: str, state: str = "ready", **changes: Any) -> None:
        """Write the entry of a server, or write it anew."""
        record = {"backend": "lite", "node": "here", "pid": 1, "detail": "", "since": time.time(), **changes}
        server = ServerRecord(address=address, state=state, **record)  # type: ignore[arg-type]
        claim = Claim(server, f"owner of {name}", next(self._numbers), 3600.0, is_first=True)
        self.call(lambda: self.registry.claim(name, claim))

    def drop(self, name: str) -> None:
        """Delete the entry of a server."""
        self.call(lambda: self.registry.withdraw(name, f"owner of {name}", next(self._numbers)))

    def wait_for(
        self, is_so: Callable[[dict[str, ServerRecord]], bool], timeout_s: float = 60.0
    ) -> dict[str, ServerRecord]:
        """Wait until the servers are as they should be, and return them."""

        async def wait() -> dict[str, ServerRecord]:
            async with asyncio.timeout(timeout_s):
                view = await self.registry.watch()
                while not is_so(view.servers):
                    view = await self.registry.watch(view.moment)
            return view.servers

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

"""The entry of a server in the list of its run, posted from the server's node every few seconds."""

import asyncio
import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from arealite.inference.registry import RegistryClient, RegistryError, RemovedError, ServerEntry

_REPEAT_S = 2.0
_WITHDRAW_S = 1.5


class Registration:
    """One entry; `registry` is None for a server of no run."""

    def __init__(self, registry: RegistryClient | None, entry: ServerEntry) -> None:
        self._registry, self._entry = registry, entry
        self._has_failed = False
        self._keeping: asyncio.Task[None] | None = None

    async def publish(self) -> None:
        """Post the entry. Raises RegistryError."""
        if self._registry is not None:
            await self._registry.put(self._entry)

    def keep(self, progress: Callable[[], str]) -> None:
        """Post the entry until `withdraw`, with the progress of loading."""
        self._keeping = asyncio.create_task(self._keep(progress))

    async def _keep(self, progress: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(_REPEAT_S)
            if self._entry.state == "loading":
                self._entry = replace(self._entry, detail=progress())
            await self._try_to_publish()

    async def note_ready(self) -> None:
        """Post that the server is ready, now or when the registry answers again."""
        self._entry = replace(self._entry, state="ready", detail="", since=time.time())
        await self._try_to_publish()

    async def _try_to_publish(self) -> None:
        try:
            await self.publish()
            self._has_failed = False
        except RemovedError:  # a trainer found the server dead, but it lives
            _warn(f"{self._entry.name} was removed from its run; it registers again")
            self._entry = replace(self._entry, incarnation=uuid.uuid4().hex)
        except RegistryError as error:
            if not self._has_failed:
                _warn(f"{self._entry.name} can't be registered yet, trying again: {error}")
            self._has_failed = True

    async def withdraw(self) -> None:
        """Remove the entry, if the registry answers soon; trainers notice the end of the server anyway."""
        if self._keeping is not None:
            self._keeping.cancel()
        registry, self._registry = self._registry, None
        if registry is not None:
            with contextlib.suppress(RegistryError, TimeoutError):
                async with asyncio.timeout(_WITHDRAW_S):
                    await registry.remove(self._entry.incarnation)


def _warn(text: str) -> None:
    print(f"serve: WARNING: {text}", file=sys.stderr, flush=True)

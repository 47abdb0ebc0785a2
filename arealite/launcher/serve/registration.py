"""The entry of a server in the list of its run, posted from the server's node every few seconds."""

import asyncio
import contextlib
import sys
import uuid
from dataclasses import replace

from arealite.inference.registry import RegistryClient, RegistryError, RemovedError, ServerEntry

_REPEAT_S = 2.0
_WITHDRAW_S = 1.5


class Registration:
    """One entry; `registry` is None for a server of no run."""

    def __init__(self, registry: RegistryClient | None, entry: ServerEntry) -> None:
        self._registry, self._entry = registry, entry
        self._keeping: asyncio.Task[None] | None = None

    def keep(self) -> None:
        """Post the entry, now and again until `withdraw`; the registry may have started anew."""
        if self._registry is not None:
            self._keeping = asyncio.create_task(self._keep(self._registry))

    async def _keep(self, registry: RegistryClient) -> None:
        name, has_failed = self._entry.name, False
        while True:
            try:
                await registry.put(self._entry)
                has_failed = False
            except RemovedError:  # a trainer found the server dead, but it lives
                _warn(f"{name} was removed from its run; it registers again")
                self._entry = replace(self._entry, incarnation=uuid.uuid4().hex)
            except RegistryError as error:
                if not has_failed:
                    _warn(f"{name} can't be registered yet, trying again: {error}")
                has_failed = True
            await asyncio.sleep(_REPEAT_S)

    async def withdraw(self) -> None:
        """Remove the entry, if the registry answers soon; trainers notice the end of the server anyway. Idempotent."""
        if self._registry is not None and self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
            with contextlib.suppress(RegistryError, TimeoutError):
                async with asyncio.timeout(_WITHDRAW_S):
                    await self._registry.remove(self._entry.incarnation)


def _warn(text: str) -> None:
    print(f"serve: WARNING: {text}", file=sys.stderr, flush=True)

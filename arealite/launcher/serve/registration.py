"""The entry of a server in the registry of its run: what trainers know of it.

It says what was said last, also after the registry was out of reach for a while, and ends with its lease if this
process does not end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from arealite.utils.name_resolve import NameRepository, NameResolveError
from arealite.utils.server_record import ServerRecord, State

LEASE_S = 10.0
_REPEAT_S = 1.0


class Registration:
    """One entry; `names` is None for a server of no run."""

    def __init__(self, names: NameRepository | None, key: str, record: ServerRecord, secret: str) -> None:
        self._names = names
        self._key = key
        self._record = record
        self._secret = secret
        self._published: ServerRecord | None = None
        self._is_out_of_reach = False
        self._turn = asyncio.Lock()

    async def publish(self) -> None:
        """Write what is not written yet. Raises NameResolveError."""
        async with self._turn:
            record = self._record
            if self._names is not None and record != self._published:
                text = record.to_text(self._key, self._secret)
                await asyncio.to_thread(self._names.add, self._key, text, keepalive_ttl=LEASE_S, replace=True)
                self._published = record

    async def say(self, state: State, detail: str = "") -> None:
        """Say how the server is, now or when the registry can be reached again."""
        since = self._record.since if state == self._record.state else time.time()
        self._record = replace(self._record, state=state, detail=detail, since=since)
        try:
            await self.publish()
            self._is_out_of_reach = False
        except NameResolveError as error:
            if not self._is_out_of_reach:
                print(f"serve: WARNING: can't write {self._key} yet, trying again: {error}", file=sys.stderr)
            self._is_out_of_reach = True

    async def keep_saying(self, progress: Callable[[], str]) -> None:
        """Repeat what could not be said, and tell what a loading server does, until cancelled."""
        while True:
            await asyncio.sleep(_REPEAT_S)
            state = self._record.state
            await self.say(state, progress() if state == "loading" else "")

    async def withdraw(self) -> None:
        """Remove the entry."""
        async with self._turn:
            if self._names is not None:
                with contextlib.suppress(NameResolveError):
                    await asyncio.to_thread(self._names.reset)

"""The entry of a server in the registry of its run, kept up to date from the server's node.

What the registry could not be told is repeated until it answers; the entry ends with its lease if this process does not
withdraw it.
"""

import asyncio
import contextlib
import itertools
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from arealite.utils.registry import Claim, RegistryClient, RegistryError, ServerRecord, State

LEASE_S = 10.0
_RENEWALS = 3  # per lease
_REPEAT_S = 1.0
_WITHDRAW_S = 2.0


class Registration:
    """One entry; `registry` is None for a server of no run."""

    def __init__(self, registry: RegistryClient | None, name: str, record: ServerRecord) -> None:
        self._registry = registry
        self._name = name
        self._record = record
        self._owner = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._published: ServerRecord | None = None
        self._renewed = 0.0  # when the entry was published or renewed last, monotonic
        self._has_failed = False
        self._turn = asyncio.Lock()

    async def publish(self) -> None:
        """Register, or renew the lease. Raises RegistryError."""
        async with self._turn:
            if self._registry is None:
                return
            record, began, is_first = self._record, time.monotonic(), self._published is None
            claim = Claim(record, self._owner, next(self._numbers), LEASE_S, is_first)
            is_new = await self._registry.claim(self._name, claim)
            self._published, self._renewed = record, began
            if is_new and not is_first:
                _warn(f"the lease of {self._name} had lapsed; it is registered again")

    async def say(self, state: State, detail: str = "") -> None:
        """Publish how the server is, now or when the registry can be reached again."""
        since = self._record.since if state == self._record.state else time.time()
        self._record = replace(self._record, state=state, detail=detail, since=since)
        try:
            await self.publish()
            self._has_failed = False
        except RegistryError as error:
            if not self._has_failed:
                _warn(f"{self._name} can't be registered yet, trying again: {error}")
            self._has_failed = True

    async def keep_saying(self, progress: Callable[[], str]) -> None:
        """Until cancelled, renew the lease, repeat what could not be published, and report how loading goes."""
        while True:
            await asyncio.sleep(_REPEAT_S)
            state = self._record.state
            detail = progress() if state == "loading" else ""
            is_due = time.monotonic() - self._renewed >= LEASE_S / _RENEWALS
            if is_due or replace(self._record, detail=detail) != self._published:
                await self.say(state, detail)

    async def withdraw(self) -> None:
        """Remove the entry, or leave it to its lease if that takes long."""
        with contextlib.suppress(RegistryError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_S), self._turn:
                if self._registry is not None and self._published is not None:
                    await self._registry.withdraw(self._name, self._owner, next(self._numbers))


def _warn(text: str) -> None:
    print(f"serve: WARNING: {text}", file=sys.stderr, flush=True)

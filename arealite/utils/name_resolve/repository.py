"""Names with values that every process of a run sees, as the launcher, servers and trainers share them.

An entry with a lease (`keepalive_ttl`) is renewed by a thread of its owner and ends soon after the owner does, however
that ends. Invariant: nobody renews or deletes at exit what is no longer his: if a process stood still, or the backend
restarted empty, the owner is told that the lease lapsed and takes the name again, but only once nobody else has it.
Calls block, for `DEADLINE_S` at most. Not to be shared with a forked child.
"""

from __future__ import annotations

import atexit
import logging
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from arealite.utils.name_resolve.etcd_store import EtcdStore
from arealite.utils.name_resolve.file_store import FileStore
from arealite.utils.name_resolve.ray_store import RayStore
from arealite.utils.name_resolve.redis_store import RedisStore
from arealite.utils.name_resolve.store import DEADLINE_S, Store, is_under

WAIT_S = 300.0
"""How long `wait` waits unless it is told."""
RENEWALS = 3
"""Per lifetime of a lease."""
RETRY_S = 1.0
"""Longest pause between attempts to renew a lease while the backend does not answer."""

Answer = TypeVar("Answer")
logger = logging.getLogger("arealite.names")


class NameResolveError(RuntimeError):
    """A name can't be added, found or looked up."""


class NameBackendError(NameResolveError):
    """What keeps the names does not answer, or refuses."""


class NameEntryExistsError(NameResolveError):
    """The name is taken."""


class NameEntryNotFoundError(NameResolveError):
    """Nobody added the name, or its lease ended."""


@dataclass
class _Entry:
    """What we added and have not deleted."""

    name: str
    text: str
    ttl_s: float | None
    delete_on_exit: bool
    on_lost: Callable[[str], None] | None
    renewed: float
    """When the last renewal that succeeded was asked for, monotonic."""
    due: float
    """When the next one is, monotonic."""
    is_lost: bool = False


class NameRepository:
    """The names of one backend; see the module. `where` says which."""

    def __init__(self, store: Store) -> None:
        self.where = store.where
        self._store = store
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition(threading.RLock())
        self._keeper: threading.Thread | None = None

    def add(
        self,
        name: str,
        value: str,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Add a name; NameEntryExistsError if it is taken and not to be replaced.

        `keepalive_ttl` is the lifetime in seconds of a lease that is renewed until the name is deleted or the process
        ends. Each time it lapses, `on_lost` is called from the renewing thread with the reason, or a warning is logged.
        """
        key = _normalised(name)
        text = f"{uuid.uuid4().hex} {value}"
        with self._changed:
            began = time.monotonic()
            if not self._put(key, text, keepalive_ttl, replace):
                raise NameEntryExistsError(
                    f"{key} must be added once: got a second value, and the first is still in {self.where}. "
                    "Delete it, or pass replace=True."
                )
            self._entries.pop(key, None)
            if keepalive_ttl is None and not delete_on_exit:
                return
            if not self._entries:
                atexit.register(self.reset)
            due = began + (keepalive_ttl or 0.0) / RENEWALS
            self._entries[key] = _Entry(key, text, keepalive_ttl, delete_on_exit, on_lost, renewed=began, due=due)
            if keepalive_ttl is not None:
                self._keep()

    def add_subentry(
        self,
        name: str,
        value: str,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> str:
        """Add a value under `name` by a key of its own, and return that key."""
        key = f"{_normalised(name)}/{uuid.uuid4().hex[:8]}"
        self.add(key, value, delete_on_exit, keepalive_ttl, on_lost=on_lost)
        return key

    def delete(self, name: str) -> None:
        """Delete a name, whoever added it."""
        key = _normalised(name)
        with self._changed:
            self._entries.pop(key, None)
            if not self._ask(self._store.delete, key, None):
                raise self._not_found(key)

    def get(self, name: str) -> str:
        """Return the value of a name."""
        key = _normalised(name)
        text = self._ask(self._store.get, key)
        if text is None:
            raise self._not_found(key)
        return _value(text)

    def items(self, root: str) -> dict[str, str]:
        """Return the names at and below `root` with their values, sorted by name, as one look saw them."""
        texts = self._ask(self._store.items, _normalised(root))
        return {key: _value(texts[key]) for key in sorted(texts)}

    def get_subtree(self, root: str) -> list[str]:
        """Return the values at and below `root`, sorted by name."""
        return list(self.items(root).values())

    def find_subtree(self, root: str) -> list[str]:
        """Return the names at and below `root`, sorted."""
        return list(self.items(root))

    def clear_subtree(self, root: str) -> None:
        """Delete the names at and below `root`, whoever added them."""
        key = _normalised(root)
        with self._changed:
            self._entries = {name: entry for name, entry in self._entries.items() if not is_under(key, name)}
            self._ask(self._store.clear, key)

    def wait(self, name: str, timeout: float | None = None, poll_frequency: float = 1.0) -> str:
        """Return the value of a name as soon as it is added, looking every `poll_frequency` seconds.

        TimeoutError after `timeout` seconds, by default `WAIT_S`.
        """
        key, deadline = _normalised(name), time.monotonic() + (WAIT_S if timeout is None else timeout)
        while True:
            try:
                return self.get(key)
            except (NameEntryNotFoundError, NameBackendError) as error:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(
                        f"{key} must be added within {WAIT_S if timeout is None else timeout:g} s: got none. "
                        f"Look at what should add it, or wait longer. The last answer: {error}"
                    ) from error
            time.sleep(min(poll_frequency, remaining))

    def watch(self, root: str, *, timeout: float, poll_frequency: float = 1.0) -> Iterator[dict[str, str]]:
        """Yield `items(root)` at once, and again whenever it has changed, until `timeout` seconds are over.

        A backend that does not answer changes nothing; NameBackendError if it still does not at the end.
        """
        deadline = time.monotonic() + timeout
        last: dict[str, str] | None = None
        while True:
            try:
                now = self.items(root)
            except NameBackendError:
                if time.monotonic() >= deadline:
                    raise
            else:
                if now != last:
                    yield now
                    last = now
                if time.monotonic() >= deadline:
                    return
            time.sleep(max(0.0, min(poll_frequency, deadline - time.monotonic())))

    def reset(self) -> None:
        """End all our leases and delete what we added with `delete_on_exit`; it happens at exit as well."""
        atexit.unregister(self.reset)
        with self._changed:
            entries, self._entries = self._entries, {}
            self._changed.notify()
            try:
                for entry in entries.values():
                    if entry.delete_on_exit:
                        self._ask(self._store.delete, entry.name, entry.text)
            except NameBackendError as error:
                logger.warning("some of %s stay behind: %s", ", ".join(entries), error)

    def _ask(self, question: Callable[..., Answer], *args: str | float | bool | None) -> Answer:
        try:
            return question(*args)
        except self._store.failures as error:
            raise NameBackendError(
                f"{self.where} must answer within {DEADLINE_S:g} s: got {type(error).__name__}: {error}. "
                "Start it, or name another one there."
            ) from error

    def _put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        return self._ask(self._store.put, key, text, ttl_s, replace) or self._ask(self._store.get, key) == text

    def _not_found(self, key: str) -> NameEntryNotFoundError:
        return NameEntryNotFoundError(
            f"{key} must be in {self.where}: got nothing. Look at what should add it, or wait() for it."
        )

    def _keep(self) -> None:
        """Renew leases from now on."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_leases, name="arealite-names", daemon=True)
            self._keeper.start()
        self._changed.notify()

    def _keep_leases(self) -> None:
        while True:
            with self._changed:
                leases = [entry for entry in self._entries.values() if entry.ttl_s is not None]
                if not leases:
                    self._keeper = None
                    return
                entry = min(leases, key=lambda lease: lease.due)
                pause = entry.due - time.monotonic()
                if pause > 0:
                    self._changed.wait(pause)
                    continue
                loss = self._renew(entry)
            if not loss:
                continue
            if entry.on_lost is None:
                logger.warning("the lease of %s lapsed: %s", entry.name, loss)
            else:
                entry.on_lost(loss)

    def _renew(self, entry: _Entry) -> str:
        """Renew a lease, or take its name again; return why it lapsed if it did since the last time."""
        assert entry.ttl_s is not None
        began = time.monotonic()
        entry.due = began + entry.ttl_s / RENEWALS
        loss = ""
        try:
            has_name = self._ask(self._store.renew, entry.name, entry.text, entry.ttl_s)
            if not has_name:
                has_name = self._put(entry.name, entry.text, entry.ttl_s, False)
                loss = "it was gone, and is taken again" if has_name else "somebody else has the name"
            if has_name:
                entry.renewed = began
        except NameBackendError as error:
            has_name = False
            entry.due = time.monotonic() + min(RETRY_S, entry.ttl_s / RENEWALS)
            if time.monotonic() - entry.renewed > entry.ttl_s:
                loss = str(error)
        if entry.is_lost:
            loss = ""
        if has_name and entry.is_lost:
            logger.info("the lease of %s holds again", entry.name)
        entry.is_lost = not has_name and (entry.is_lost or bool(loss))
        return loss


def make_repository(
    type: str,
    *,
    nfs_record_root: str | Path = "",
    redis_addr: str = "",
    etcd3_addr: str = "",
    ray_actor_name: str = "",
) -> NameRepository:
    """Return the names kept by `type`; the other arguments are those of its configuration, one for each type."""
    match type:
        case "nfs":
            return NameRepository(FileStore(Path(nfs_record_root)))
        case "redis":
            return NameRepository(RedisStore(*_host_and_port(redis_addr)))
        case "etcd3":
            return NameRepository(EtcdStore(*_host_and_port(etcd3_addr)))
        case "ray":
            return NameRepository(RayStore(ray_actor_name))
    raise ValueError(f"cluster.name_resolve.type must be nfs, redis, etcd3 or ray: got {type}. Choose one of them.")


def _normalised(name: str) -> str:
    key = posixpath.normpath(name.strip("/")) if name else ""
    if not key or key.startswith(".") or not key.isprintable():
        raise ValueError(f"a name must be words between slashes: got {name!r}. Write it like experiment/trial/role.")
    return key


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"the address of a name server must be host:port: got {address!r}. Write it like 10.0.0.1:6379."
        )
    return host, int(port)


def _value(text: str) -> str:
    return text.partition(" ")[2]

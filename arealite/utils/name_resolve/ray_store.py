"""Names in an actor of the run's Ray cluster; `arealite[ray]` installs Ray.

The actor outlives the process that started it, and ends when `clear` leaves it empty. If its machine is lost, Ray
starts it elsewhere without any entries: those with leases come back by themselves. A process that is not connected to
Ray connects to the cluster that RAY_ADDRESS, or else this machine, belongs to.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arealite.utils.name_resolve.store import DEADLINE_S, is_under

NAMESPACE = "arealite"
START_S = 60.0
"""For the actor's process to start."""


class _Names:
    """The actor. Lifetimes are measured by its own monotonic clock."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, float]] = {}

    def put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        is_put = replace or self.get(key) is None
        if is_put:
            self._entries[key] = text, float("inf") if ttl_s is None else time.monotonic() + ttl_s
        return is_put

    def renew(self, key: str, text: str, ttl_s: float) -> bool:
        return self.get(key) == text and self.put(key, text, ttl_s, True)

    def delete(self, key: str, text: str | None) -> bool:
        has_it = self.get(key) is not None and text in (None, self.get(key))
        if has_it:
            del self._entries[key]
        return has_it

    def get(self, key: str) -> str | None:
        return self._living().get(key)

    def items(self, root: str) -> dict[str, str]:
        return {key: text for key, text in self._living().items() if is_under(root, key)}

    def clear(self, root: str) -> None:
        import ray

        for key in self.items(root):
            del self._entries[key]
        if not self._entries:
            ray.actor.exit_actor()

    def _living(self) -> dict[str, str]:
        now = time.monotonic()
        self._entries = {key: entry for key, entry in self._entries.items() if entry[1] > now}
        return {key: text for key, (text, _) in self._entries.items()}


class RayStore:
    """See the module; `name` is the actor's."""

    def __init__(self, name: str) -> None:
        import ray

        self.where = f"the actor {name} of Ray (cluster.name_resolve.ray_actor_name)"
        self.failures: tuple[type[Exception], ...] = (ray.exceptions.RayError, ConnectionError)
        self._ray = ray
        self._name = name
        self._actor: Any = None
        self._connecting = threading.Lock()

    def put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        """See `Store`."""
        return bool(self._ask("put", key, text, ttl_s, replace))

    def renew(self, key: str, text: str, ttl_s: float) -> bool:
        """See `Store`."""
        return bool(self._ask("renew", key, text, ttl_s))

    def delete(self, key: str, text: str | None) -> bool:
        """See `Store`."""
        return bool(self._ask("delete", key, text))

    def get(self, key: str) -> str | None:
        """See `Store`."""
        text: str | None = self._ask("get", key)
        return text

    def items(self, root: str) -> dict[str, str]:
        """See `Store`."""
        texts: dict[str, str] = self._ask("items", root)
        return texts

    def clear(self, root: str) -> None:
        """See `Store`."""
        try:
            self._call("clear", root)
        except self._ray.exceptions.ActorDiedError:  # it ended because nothing is left
            self._actor = None

    def _ask(self, method: str, *args: str | float | bool | None) -> Any:
        try:
            return self._call(method, *args)
        except self._ray.exceptions.ActorDiedError:  # it ended because it was empty; so is the next one
            self._actor = None
            return self._call(method, *args)

    def _call(self, method: str, *args: str | float | bool | None) -> Any:
        return self._ray.get(getattr(self._connected(), method).remote(*args), timeout=DEADLINE_S)

    def _connected(self) -> Any:
        """Return the actor, started if there is none."""
        with self._connecting:
            if not self._ray.is_initialized():
                with ThreadPoolExecutor(1) as thread:  # in the main thread, Ray would replace our handler of SIGTERM
                    thread.submit(
                        self._ray.init,
                        address="auto",
                        namespace=NAMESPACE,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                    ).result()
            if self._actor is None:
                named = self._ray.remote(_Names).options(
                    name=self._name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=-1,
                )
                actor = named.remote()
                self._ray.get(actor.__ray_ready__.remote(), timeout=START_S)
                self._actor = actor
            return self._actor

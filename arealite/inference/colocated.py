"""The embedded server in the trainer's process, on the trainer's own parameters (`allocation_mode=lite.d1|d1`).

Requests, pauses and health go over HTTP on loopback as to any server. Only weights take another way: a publication
hands the server the actor's tensors, and copies those alone that have another dtype than `lite.dtype`, or that are not
the actor's own (merged adapters). Invariant: from the first optimizer step after a publication to the next one nothing
is sampled, so that every token's version is that of the weights that sampled it.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from arealite.api.config.rollout import ColocatedConfig
from arealite.api.errors import ServerError
from arealite.rollout.event_loop import EventLoopThread
from arealite.server.app import load_server
from arealite.utils import heartbeat
from arealite.utils.http_server import HttpServer
from arealite.utils.network import LOOPBACK

T = TypeVar("T")
_STEP_S = 120.0  # most that a step of the server may take
_CLOSE_S = 5.0


class ColocatedServer:
    """One server; a `WeightSharing` for the actor."""

    def __init__(self, config: ColocatedConfig, *, allow_stale_kv: bool, seed: int, secret: str | None) -> None:
        """Load the model and listen on loopback."""
        logging.getLogger("arealite.generation").setLevel(logging.WARNING)  # the console is the trainer's
        options: dict[str, Any] = {
            name: value for name, value in vars(config).items() if name not in ("path", "device")
        }
        device = "cuda" if torch.cuda.is_available() else "cpu"  # as the actor decides
        with torch.random.fork_rng():  # loading must not change what the trainer draws
            self._engine, server = load_server(
                config.path, **options, device=device, allow_stale_kv=allow_stale_kv, seed=seed, secret=secret
            )
        self.is_current = True  # whether the actor has its weights of the last publication
        self.stopped = self._engine.stopped
        self._http = HttpServer(server.app, secret)
        self._loop = EventLoopThread("arealite-server", what="server loop")
        self._loop.closers.append(self._http.close)
        try:
            self.address = f"{LOOPBACK}:{self._loop.run(self._http.start(LOOPBACK))}"
        except BaseException:
            self.close()
            raise

    def share(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Sample from these tensors, named as in a checkpoint, as weights of `version`."""
        self._wait(self._engine.update_weights(weights, str(version), shares=True))
        self.is_current = True

    def release(self) -> None:
        """Return once no forward pass reads the tensors, until the next `share`; requests wait with their caches."""
        if self.is_current and not self.stopped.done():
            self.is_current = False
            self._wait(self._engine.await_weights())

    def check(self) -> None:
        """Raise if nothing generates any more."""
        if self.stopped.done():
            raise ServerError("the server in the trainer's process must run: it has ended. See the log.") from (
                self.stopped.exception()
            )

    def close(self) -> None:
        """End requests with the tokens so far, and stop listening."""
        self._engine.close()
        self._loop.close(_CLOSE_S)

    def _wait(self, done: Future[T]) -> T:
        """Wait for the engine to do something between two steps."""
        with heartbeat.waiting("the server in this process to end its step", on="servers"):
            try:
                return done.result(timeout=_STEP_S)
            except TimeoutError:
                raise ServerError(
                    f"the server in the trainer's process must end a step within {_STEP_S:g} s: it did not. Lower "
                    "lite.slots, or see where the thread `generation` hangs."
                ) from None

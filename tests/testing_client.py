"""A client of real servers in threads of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from testing_server import ScriptedServer, serve

from arealite.api.cli_args import InferenceEngineConfig
from arealite.inference.remote_engine import RemoteInferenceEngine


@contextlib.contextmanager
def connected(*servers: ScriptedServer, **config: Any) -> Iterator[RemoteInferenceEngine]:
    """Serve, connect an engine, and take everything down again."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(serve(server))
        addresses = [server.address for server in servers]
        engine = RemoteInferenceEngine(InferenceEngineConfig(server_addrs=addresses, **config))
        stack.callback(engine.destroy)
        engine.initialize(None, None)
        yield engine


def in_loop(engine: RemoteInferenceEngine, function: Callable[[], object]) -> None:
    """Call a function in the event loop of an engine, the only thread that may change its servers."""

    async def call() -> None:
        function()

    engine._require_executor().loop.run(call())

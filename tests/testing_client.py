"""A client of real servers in threads of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from testing_server import ScriptedServer, serve

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.remote_engine import RemoteInferenceEngine

LIMIT_S = 120.0
"""For what must happen; only a failing test waits so long."""
T = TypeVar("T")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Whatever a test enters here is taken down at its end, the last one first."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


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


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def in_background(call: Callable[[], T]) -> Iterator[Future[T]]:
    """Call a function in a thread of its own, which ends before a block that succeeds."""
    pool = ThreadPoolExecutor(1)
    yield pool.submit(call)
    pool.shutdown()


def publish_from_disk(engine: RemoteInferenceEngine, folder: Path, version: int) -> None:
    """Let servers load a checkpoint that holds its version, as `publish_weights` does."""
    folder.mkdir()
    (folder / "weights").write_text(str(version))
    meta = WeightUpdateMeta("disk", path=str(folder), version=version, timeout_s=60.0)
    received = engine.update_weights(meta)
    meta.transfer.uploaded.set_result(None)
    received.result(LIMIT_S)

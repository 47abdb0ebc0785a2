"""Servers register, leave, vanish and start anew: real scripted servers, a real registry, a real client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testing_registry import RUN, Registry
from testing_server import ScriptedServer, serve, token_at

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError, UnreachableError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.inference.backends.base import ServerConnection
from arealite.inference.backends.lite import LiteBackend
from arealite.inference.http import StatusError
from arealite.inference.pool import NO_VERSION, ServerFacts
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.environment import SECRET_VARIABLE

LIMIT_S = 120.0


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(tmp_path)
    yield one
    one.names.reset()


def serving(stack: contextlib.ExitStack, **knobs: Any) -> ScriptedServer:
    return stack.enter_context(serve(ScriptedServer(**knobs)))


def connect(stack: contextlib.ExitStack, registry: Registry, num_servers: int, **config: Any) -> RemoteInferenceEngine:
    torch.set_num_threads(1)
    settings = {"setup_timeout": LIMIT_S, "backend": "lite", **RUN, **config}
    engine = RemoteInferenceEngine(
        InferenceEngineConfig(num_servers=num_servers, name_resolve=registry.config, **settings)
    )
    stack.callback(engine.destroy)
    engine.initialize(None, None)
    return engine


def generate(engine: RemoteInferenceEngine, rid: str = "a", num_tokens: int = 4) -> ModelResponse:
    request = ModelRequest([5, 6, 7], GenerationHyperparameters(max_new_tokens=num_tokens), rid=rid)
    return asyncio.run(engine.agenerate(request))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def addresses(engine: RemoteInferenceEngine) -> list[str]:
    return [server.address for server in engine.servers.servers]


def publish(engine: RemoteInferenceEngine, version: int) -> None:
    """Take it that all members got weights."""
    engine.servers.note_publication(engine.servers.servers, version)


def test_a_run_begins_when_enough_servers_are_ready(
    stack: contextlib.ExitStack, registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arealite.inference.discovery._TELL_S", 0.5)
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address)
    registry.put("server-1", second.address, state="loading", detail="shard 3 of 8", since=time.time() - 70)
    ready = threading.Timer(2.5, lambda: registry.put("server-1", second.address))
    stack.callback(ready.join)
    ready.start()
    with caplog.at_level(logging.INFO):
        engine = connect(stack, registry, 2)
    assert set(addresses(engine)) == {first.address, second.address}
    waiting = rf"got 1 of 2; server-0 at {first.address} is ready \(\d+ s\); server-1 at {second.address} is loading"
    assert re.search(rf"{waiting} \(7\d s\): shard 3 of 8", caplog.text)
    assert {generate(engine, rid=str(index)).server for index in range(8)} == {first.address, second.address}
    metrics = engine.metrics()
    assert (metrics["servers/live"], metrics["servers/joined"], metrics["servers/left"]) == (2, 0, 0)


def test_who_is_missing_is_told_in_the_end(stack: contextlib.ExitStack, registry: Registry) -> None:
    server = serving(stack)
    registry.put("server-0", server.address, state="loading", detail="reading config.json")
    rule = r"2 inference servers must be ready within 1.5 s: got 0 of 2; server-0 at .* is loading \(. s\): reading con"
    with pytest.raises(
        ServerError, match=f"{rule}.*1 did not register as exp/t/servers/... in .*{registry.config.nfs_record_root}"
    ):
        connect(stack, registry, 2, setup_timeout=1.5)


def test_a_server_that_can_not_serve_the_run_ends_its_start(stack: contextlib.ExitStack, registry: Registry) -> None:
    registry.put("server-0", serving(stack).address, backend="vllm")
    with pytest.raises(ConfigError, match="servers of this run must be lite: got vllm"):
        connect(stack, registry, 1)


def test_entries_without_the_signature_of_the_run_are_ignored(
    stack: contextlib.ExitStack, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "secret of the run")
    good, bad = serving(stack), serving(stack)
    registry.secret = "another secret"
    registry.put("server-9", bad.address)
    registry.secret = "secret of the run"
    registry.put("server-0", good.address)
    engine = connect(stack, registry, 1)
    with pytest.raises(TimeoutError):
        engine.wait(1, timeout=2.5)
    assert addresses(engine) == [good.address]
    assert sum("a registered server is ignored" in line for line in caplog.messages) == 1


def test_a_newcomer_idles_until_it_has_weights(stack: contextlib.ExitStack, registry: Registry) -> None:
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address)
    engine = connect(stack, registry, 1)
    registry.put("server-1", second.address)
    until(lambda: len(engine.servers.servers) == 2)
    assert [one.address for one in engine.servers.stale] == [second.address]
    assert {generate(engine, rid=str(index)).server for index in range(6)} == {first.address}
    publish(engine, 1)
    second.version = first.version = 1
    assert {generate(engine, rid=str(index)).server for index in range(12)} == {first.address, second.address}
    metrics = engine.metrics()
    assert (metrics["servers/live"], metrics["servers/joined"], metrics["servers/left"]) == (2, 1, 0)


def test_a_server_that_leaves_gives_its_requests_back_exactly(stack: contextlib.ExitStack, registry: Registry) -> None:
    leaves, stays = serving(stack, token_delay_s=0.02), serving(stack)
    registry.put("server-0", leaves.address)
    registry.put("server-1", stays.address)
    engine = connect(stack, registry, 2)
    engine.servers.pick("load", 10**6)
    if engine.servers.servers[0].address == leaves.address:  # whoever was met first got the load
        engine.servers.release(engine.servers.servers[0], 10**6)
        engine.servers.pick("load of the other", 10**6)
    responses: list[ModelResponse] = []
    for server in engine.servers.servers:
        server.outstanding_tokens = 0 if server.address == leaves.address else 10**6
    thread = threading.Thread(target=lambda: responses.append(generate(engine, num_tokens=200)))
    thread.start()
    until(lambda: len(leaves.requests) == 1)
    registry.put("server-0", leaves.address, state="leaving")
    until(lambda: addresses(engine) == [stays.address])
    leaves.abort_all()
    thread.join(LIMIT_S)
    (response,) = responses
    seed = leaves.requests[0]["sampling_params"]["sampling_seed"]
    assert response.output_tokens == [token_at(seed, 3 + index) for index in range(200)]
    num_given_back = len(stays.requests[0]["input_ids"]) - 3
    assert 0 < num_given_back < 200 and (response.server, response.num_interrupts) == (stays.address, 1)
    registry.drop("server-0")
    assert engine.metrics()["servers/left"] == 1


def test_only_who_does_not_answer_goes_when_its_entry_vanishes(stack: contextlib.ExitStack, registry: Registry) -> None:
    """A registry that starts anew, empty, must not take the servers along."""
    alive, dead = serving(stack), ScriptedServer()
    with serve(dead):
        registry.put("server-0", alive.address)
        registry.put("server-1", dead.address)
        engine = connect(stack, registry, 2)
    registry.drop("server-0")
    registry.drop("server-1")
    until(lambda: addresses(engine) == [alive.address])
    assert generate(engine).server == alive.address
    registry.put("server-0", alive.address, pid=2)
    until(lambda: [one.version for one in engine.servers.servers] == [NO_VERSION])


def test_a_server_that_started_anew_has_unknown_weights(stack: contextlib.ExitStack, registry: Registry) -> None:
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address, since=100.0)
    registry.put("server-1", second.address)
    engine = connect(stack, registry, 2)
    publish(engine, 3)
    first.version = second.version = 3
    registry.put("server-0", first.address, pid=2)
    until(lambda: [one.version for one in engine.servers.servers if one.address == first.address] == [NO_VERSION])
    assert {generate(engine, rid=str(index)).server for index in range(6)} == {second.address}


def test_a_registry_that_does_not_answer_changes_nothing(
    stack: contextlib.ExitStack, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address)
    registry.put("server-1", second.address)
    engine = connect(stack, registry, 2)
    folder, away = Path(registry.config.nfs_record_root, ".names"), Path(registry.config.nfs_record_root, "away")
    folder.rename(away)
    folder.write_text("not a folder")
    until(lambda: any("not noticed for the time being" in line for line in caplog.messages))
    assert {generate(engine, rid=str(index)).server for index in range(8)} == {first.address, second.address}
    folder.unlink()
    away.rename(folder)
    until(lambda: any(line.endswith("answers again") for line in caplog.messages))
    assert len(addresses(engine)) == 2 and len(engine.servers.live) == 2


@pytest.mark.parametrize("limit", [None, 10])
def test_capacity_follows_the_members_up_to_what_is_configured(
    stack: contextlib.ExitStack, registry: Registry, limit: int | None
) -> None:
    servers = [serving(stack) for _ in range(3)]
    for index in range(2):
        registry.put(f"server-{index}", servers[index].address)
    engine = connect(stack, registry, 2, consumer_batch_size=10, max_concurrent_rollouts=limit)
    account = engine._require_executor()._account
    assert account.max_concurrent == 10
    registry.put("server-2", servers[2].address)
    until(lambda: len(engine.servers.servers) == 3)
    assert account.max_concurrent == 10, "who has no weights adds nothing"
    publish(engine, 1)
    until(lambda: len(engine.servers.live) == 3 and account.max_concurrent == (limit or 15))
    for index, expected in ((2, 10), (1, 5), (0, 1)):
        registry.put(f"server-{index}", servers[index].address, state="leaving")
        until(functools.partial(lambda expected: account.max_concurrent == expected, expected))


def test_a_meeting_that_fails_takes_place_again(
    stack: contextlib.ExitStack, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start and later; of two entries at one address the newer one counts."""
    failures: list[ServerError] = [UnreachableError("reset"), StatusError("starting", 503)]
    meet = LiteBackend.meet

    async def fail_first(backend: LiteBackend, caller: ServerConnection) -> ServerFacts:
        if failures:
            raise failures.pop()
        return await meet(backend, caller)

    monkeypatch.setattr(LiteBackend, "meet", fail_first)
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address, backend="vllm", since=100.0)
    registry.put("server-1", first.address, since=200.0)
    engine = connect(stack, registry, 1)
    assert not failures and addresses(engine) == [first.address]
    failures.append(UnreachableError("reset"))
    registry.put("server-2", second.address)
    until(lambda: len(engine.servers.servers) == 2)
    assert not failures


def test_requests_wait_while_no_server_is_there(stack: contextlib.ExitStack, registry: Registry) -> None:
    first, second = serving(stack, token_delay_s=0.01), serving(stack)
    registry.put("server-0", first.address)
    engine = connect(stack, registry, 1)
    responses: list[ModelResponse] = []
    thread = threading.Thread(target=lambda: responses.append(generate(engine, num_tokens=100)))
    thread.start()
    until(lambda: len(first.requests) == 1)
    registry.put("server-0", first.address, state="leaving")
    until(lambda: not engine.servers.servers)
    first.abort_all()
    time.sleep(1.0)
    assert not responses
    registry.put("server-1", second.address)
    until(lambda: len(engine.servers.stale) == 1)
    publish(engine, 0)
    thread.join(LIMIT_S)
    seed = first.requests[0]["sampling_params"]["sampling_seed"]
    assert responses[0].output_tokens == [token_at(seed, 3 + index) for index in range(100)]
    assert responses[0].server == second.address
    registry.put("server-1", second.address, state="leaving")
    until(lambda: not engine.servers.servers)
    engine.config.setup_timeout = 1.0
    with pytest.raises(ServerError, match=r"weights of version 0 must be there within 1 s: got no server"):
        generate(engine)

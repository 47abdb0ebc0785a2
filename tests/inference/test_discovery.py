"""Servers register, leave, vanish and start anew: real scripted servers, a real registry, a real client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from testing_client import LIMIT_S, in_background, in_loop, until
from testing_raw import REPLIES, json_reply
from testing_registry import RUN, RunningRegistry
from testing_server import ScriptedServer, serve, token_at

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.inference.pool import NO_VERSION, Server
from arealite.inference.registry import RegistryClient, RegistryError, RemovedError, ServerEntry
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.processes import REGISTRY_VARIABLE
from arealite.utils.secret import SECRET_VARIABLE, ensure_secret

SECRET = "secret of this run"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRegistry]:
    one = RunningRegistry(SECRET)
    monkeypatch.setenv(REGISTRY_VARIABLE, one.address)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    yield one
    one.close()


def serving(stack: ExitStack, **knobs: Any) -> ScriptedServer:
    return stack.enter_context(serve(ScriptedServer(**knobs)))


def connect(stack: ExitStack, num_servers: int, **config: Any) -> RemoteInferenceEngine:
    torch.set_num_threads(1)
    settings = {"setup_timeout": LIMIT_S, "backend": "lite", **RUN, **config}
    engine = RemoteInferenceEngine(InferenceEngineConfig(num_servers=num_servers, **settings))
    stack.callback(engine.destroy)
    engine.initialize(None, None)
    return engine


def generate(engine: RemoteInferenceEngine, rid: str = "a", num_tokens: int = 4) -> ModelResponse:
    request = ModelRequest([5, 6, 7], GenerationHyperparameters(max_new_tokens=num_tokens), rid=rid)
    return asyncio.run(engine.agenerate(request))


def addresses(engine: RemoteInferenceEngine) -> list[str]:
    return [server.address for server in engine.servers.servers]


def publish(engine: RemoteInferenceEngine, version: int) -> None:
    """Take it that all members got weights."""
    in_loop(engine, lambda: engine.servers.advance(engine.servers.servers, version))


def test_a_run_begins_when_enough_servers_are_ready(
    stack: ExitStack,
    registry: RunningRegistry,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("arealite.inference.discovery._TELL_S", 0.5)
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address)
    waiting = f"got 1 of 2; server-0 at {first.address} is ready; 1 did not register at {registry.address}"

    def become_ready() -> None:
        until(lambda: waiting in caplog.text)
        registry.put("server-1", second.address)

    with in_background(become_ready):
        engine = connect(stack, 2)
    assert set(addresses(engine)) == {first.address, second.address}
    assert {generate(engine, rid=str(index)).server for index in range(8)} == {first.address, second.address}
    metrics = engine.metrics()
    assert (metrics["servers/live"], metrics["servers/joined"], metrics["servers/left"]) == (2, 0, 0)


def test_who_is_missing_is_told_in_the_end(stack: ExitStack, registry: RunningRegistry) -> None:
    registry.put("server-0", serving(stack).address)
    rule = r"2 inference servers must be ready within 1.5 s: got 1 of 2; server-0 at \S+ is ready"
    with pytest.raises(ServerError, match=f"{rule}; 1 did not register at {registry.address}"):
        connect(stack, 2, setup_timeout=1.5)


def test_a_server_that_can_not_serve_the_run_ends_its_start(stack: ExitStack, registry: RunningRegistry) -> None:
    registry.put("server-0", serving(stack).address, backend="vllm")
    with pytest.raises(ConfigError, match="servers of this run must be lite: got vllm"):
        connect(stack, 1)


def test_a_trainer_with_another_secret_says_that_the_registry_refuses_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = RunningRegistry("secret of the run")
    stack.callback(guarded.close)
    monkeypatch.setenv(REGISTRY_VARIABLE, guarded.address)
    guarded.put("server-0", serving(stack).address)
    monkeypatch.setenv(SECRET_VARIABLE, "another secret")
    with pytest.raises(
        ServerError, match=f"registry of the run at {guarded.address} refuses: .* the secret of the run"
    ):
        connect(stack, 1, setup_timeout=1.5)
    monkeypatch.setenv(SECRET_VARIABLE, "secret of the run")
    assert len(addresses(connect(stack, 1))) == 1


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1:"), ("::1", "[::1]:")])
def test_without_a_launcher_the_trainer_keeps_the_registry(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, address: str
) -> None:
    """It listens where torchrun's ranks meet, and its address is in the run folder as long as it does."""
    monkeypatch.setenv(REGISTRY_VARIABLE, "")
    monkeypatch.setenv("MASTER_ADDR", host)
    file = tmp_path / "exp" / "t" / "registry.json"
    server = serving(stack)

    def join() -> None:
        until(file.exists)
        secret = ensure_secret(file.parent)
        entry = ServerEntry("server-0", server.address, "lite", "x")
        asyncio.run(RegistryClient(file, secret).put(entry))

    with in_background(join):
        engine = connect(stack, 1, fileroot=str(tmp_path))
    assert addresses(engine) == [server.address]
    assert json.loads(file.read_text())["address"].startswith(address)
    engine.destroy()
    assert not file.exists()


def test_a_newcomer_serves_at_once_until_weights_were_updated(stack: ExitStack, registry: RunningRegistry) -> None:
    """An evaluation never updates weights, and its servers may start anew."""
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address)
    engine = connect(stack, 1)
    registry.put("server-0", first.address, life=2)
    registry.put("server-1", second.address)
    until(lambda: len(engine.servers.serving) == 2 and engine.metrics()["servers/joined"] == 2)
    assert len({generate(engine, rid=str(index)).server for index in range(6)}) == 2


def test_a_newcomer_idles_until_it_has_weights(stack: ExitStack, registry: RunningRegistry) -> None:
    first, second = serving(stack, version=1), serving(stack)
    registry.put("server-0", first.address)
    engine = connect(stack, 1)
    publish(engine, 1)
    registry.put("server-1", second.address)
    until(lambda: len(engine.servers.servers) == 2)
    assert [one.address for one in engine.servers.joining] == [second.address]
    assert {generate(engine, rid=str(index)).server for index in range(6)} == {first.address}
    publish(engine, 2)
    second.version = first.version = 2
    assert {generate(engine, rid=str(index)).server for index in range(12)} == {first.address, second.address}
    metrics = engine.metrics()
    assert (metrics["servers/live"], metrics["servers/joined"], metrics["servers/left"]) == (2, 1, 0)


def test_a_server_that_leaves_gives_its_requests_back_exactly(stack: ExitStack, registry: RunningRegistry) -> None:
    leaves, stays = serving(stack, holds_at=103), serving(stack)
    registry.put("server-0", leaves.address)
    registry.put("server-1", stays.address)
    engine = connect(stack, 2)
    for server in engine.servers.servers:
        server.outstanding_tokens = 0 if server.address == leaves.address else 10**6
    with in_background(lambda: generate(engine, num_tokens=200)) as pending:
        leaves.wait_until_held()
        registry.drop("server-0")
        until(lambda: addresses(engine) == [stays.address])
        leaves.abort_all()
    response = pending.result()
    seed = leaves.requests[0]["sampling_params"]["sampling_seed"]
    assert response.output_tokens == [token_at(seed, 3 + index) for index in range(200)]
    assert len(stays.requests[0]["input_ids"]) == 103
    assert (response.server, response.num_interrupts) == (stays.address, 1)
    registry.drop("server-0")
    assert engine.metrics()["servers/left"] == 1


@contextlib.contextmanager
def two_servers(
    stack: ExitStack, registry: RunningRegistry, **config: Any
) -> Iterator[tuple[RemoteInferenceEngine, ScriptedServer, ScriptedServer]]:
    """Connect to two servers, of which the second dies at the end of the block, and is soon found dead."""
    alive, dead = serving(stack), ScriptedServer()
    with serve(dead):
        registry.put("server-0", alive.address)
        registry.put("server-1", dead.address)
        engine = connect(stack, 2, **config)
        health = engine._completions.health
        health.idle_s, health.health_s, health.dead_s = 0.2, 0.5, 0.2
        yield engine, alive, dead


def test_a_server_that_died_before_it_was_contacted_is_removed_also_from_the_registry(
    stack: ExitStack, registry: RunningRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.put("server-0", serving(stack).address)
    connect(stack, 1, setup_timeout=1.0)._completions.health.dead_s = 0.5
    dead = ScriptedServer()
    with serve(dead):
        pass
    registry.put("joined", dead.address)
    until(lambda: list(registry.servers) == ["server-0"])
    with pytest.raises(RemovedError):
        registry.put("joined", dead.address)
    assert f"server {dead.address} could not be met" in caplog.text


def test_a_server_that_shares_the_trainers_gpu_is_not_removed_from_the_registry(
    stack: ExitStack, registry: RunningRegistry
) -> None:
    """It may only hang, and must be told to sleep before the trainer computes."""
    found: list[Server] = []
    with two_servers(stack, registry, servers_sleep=True) as (engine, alive, _):
        health = engine._completions.health
        on_dead = health.on_dead

        def note(server: Server) -> None:
            found.append(server)
            on_dead(server)

        health.on_dead = note
    until(lambda: len(found) >= 3)
    assert set(registry.servers) == {"server-0", "server-1"} and len(addresses(engine)) == 2
    assert [one.address for one in engine.servers.serving] == [alive.address]


def test_a_server_is_removed_only_once_the_registry_can_be_asked(
    stack: ExitStack, registry: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's node may be cut off: with the entry unchanged, nobody would meet a living server again."""
    attempts = []
    with two_servers(stack, registry) as (engine, alive, dead):
        assert engine._membership is not None
        client = engine._membership._registry
        remove = client.remove

        async def cut_off_twice(incarnation: str) -> None:
            attempts.append(len(addresses(engine)))
            if len(attempts) < 3:
                raise RegistryError("no network")
            await remove(incarnation)

        monkeypatch.setattr(client, "remove", cut_off_twice)
    until(lambda: addresses(engine) == [alive.address] and list(registry.servers) == ["server-0"])
    assert attempts == [2, 2, 2], "it is a member until then"
    with pytest.raises(RemovedError):
        registry.put("server-1", dead.address)
    assert generate(engine).server == alive.address


def test_a_server_that_started_anew_has_unknown_weights(stack: ExitStack, registry: RunningRegistry) -> None:
    first, second = serving(stack), serving(stack)
    registry.put("server-0", first.address)
    registry.put("server-1", second.address)
    engine = connect(stack, 2)
    publish(engine, 3)
    first.version = second.version = 3
    registry.put("server-0", first.address, life=2)
    until(lambda: [one.version for one in engine.servers.servers if one.address == first.address] == [NO_VERSION])
    assert {generate(engine, rid=str(index)).server for index in range(6)} == {second.address}


def test_a_registry_that_does_not_answer_changes_nothing(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does the next one, at another address and empty."""
    monkeypatch.setenv(REGISTRY_VARIABLE, str(tmp_path / "registry.json"))
    first, second = serving(stack), serving(stack)
    registry = RunningRegistry(file=tmp_path / "registry.json")
    registry.put("server-0", first.address)
    registry.put("server-1", second.address)
    engine = connect(stack, 2)
    publish(engine, 0)
    registry.close()
    until(lambda: any("not noticed for the time being" in line for line in caplog.messages))
    assert {generate(engine, rid=str(index)).server for index in range(8)} == {first.address, second.address}
    registry = RunningRegistry(file=tmp_path / "registry.json")
    stack.callback(registry.close)
    until(lambda: any(line.endswith("answers again") for line in caplog.messages))
    registry.put("server-0", first.address)
    registry.put("server-2", (third := serving(stack)).address)
    until(lambda: len(addresses(engine)) == 3)
    assert set(addresses(engine)) == {first.address, second.address, third.address}
    assert {one.address for one in engine.servers.serving} == {first.address, second.address}


@pytest.mark.parametrize("limit", [None, 10])
def test_capacity_follows_the_members_up_to_what_is_configured(
    stack: ExitStack, registry: RunningRegistry, limit: int | None
) -> None:
    servers = [serving(stack) for _ in range(3)]
    for index in range(2):
        registry.put(f"server-{index}", servers[index].address)
    engine = connect(stack, 2, consumer_batch_size=10, max_concurrent_rollouts=limit)
    account = engine._require_executor()._account
    assert account.max_concurrent == 10
    publish(engine, 0)
    registry.put("server-2", servers[2].address)
    until(lambda: len(engine.servers.servers) == 3)
    assert account.max_concurrent == 10, "who has no weights adds nothing"
    publish(engine, 1)
    until(lambda: len(engine.servers.serving) == 3 and account.max_concurrent == (limit or 15))
    for index, expected in ((2, 10), (1, 5), (0, 1)):
        registry.drop(f"server-{index}")
        until(functools.partial(lambda expected: account.max_concurrent == expected, expected))


@pytest.mark.parametrize(
    "reply",
    [
        *(REPLIES[kind] for kind in ("ssh", "redirect")),
        *map(json_reply, (b"[]", b'{"dtype": "f')),
    ],
)
def test_a_newcomer_that_answers_nonsense_joins_when_it_answers_well(
    stack: ExitStack, registry: RunningRegistry, caplog: pytest.LogCaptureFixture, reply: bytes
) -> None:
    """The task that meets it survives any reply, and says which one it was without showing the run's secret."""
    registry.put("server-0", serving(stack).address)
    engine = connect(stack, 1)
    newcomer = serving(stack, raw={"/get_model_info": reply})
    registry.put("server-1", newcomer.address)
    until(lambda: any(f"server {newcomer.address} " in line for line in caplog.messages))
    newcomer.raw.clear()
    if reply == REPLIES["redirect"]:
        assert "is turned away" in caplog.text, "as with any status below 500"
        registry.put("server-1", newcomer.address, life=2)
    until(lambda: len(engine.servers.servers) == 2)
    gc.collect()
    assert SECRET not in caplog.text and "exception" not in caplog.text


def test_a_watch_that_fails_ends_the_wait_for_servers(
    stack: ExitStack, registry: RunningRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(RegistryClient, "watch", fail)
    with pytest.raises(RuntimeError, match=r"noticing which servers come and go must not fail: .* a defect of ours"):
        connect(stack, 1)


def test_requests_wait_while_no_server_is_there(stack: ExitStack, registry: RunningRegistry) -> None:
    first, second = serving(stack, token_delay_s=0.01), serving(stack)
    registry.put("server-0", first.address)
    engine = connect(stack, 1)
    with in_background(lambda: generate(engine, num_tokens=100)) as pending:
        until(lambda: len(first.requests) == 1)
        registry.drop("server-0")
        until(lambda: not engine.servers.servers)
        first.abort_all()
        time.sleep(0.5)
        assert not pending.done()
        registry.put("server-1", second.address)
    seed = first.requests[0]["sampling_params"]["sampling_seed"]
    assert pending.result().output_tokens == [token_at(seed, 3 + index) for index in range(100)]
    assert pending.result().server == second.address
    registry.drop("server-1")
    until(lambda: not engine.servers.servers)
    engine.config.setup_timeout = 1.0
    with pytest.raises(ServerError, match=r"weights of version 0 must be there within 1 s: got no server"):
        generate(engine)


def test_a_script_that_nothing_started_says_at_once_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["my grpo.py", "--config", "c.yaml"])
    monkeypatch.delenv(REGISTRY_VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    engine = RemoteInferenceEngine(InferenceEngineConfig(num_servers=1, **RUN))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"Type `python3 -m arealite.launcher.local 'my grpo.py' --config c.yaml`, or"
    ):
        engine.initialize(None, None)

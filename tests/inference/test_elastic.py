"""A trainer and real embedded servers that join, leave, die and start anew while episodes run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import tiny_models
import torch
from aiohttp import web
from tensordict import TensorDict
from testing_client import LIMIT_S, in_background, until
from testing_lite import LiteServer, slow_down
from testing_registry import RUN, RunningRegistry
from testing_server import serve
from testing_workflows import SamplingWorkflow

from arealite.api.cli_args import InferenceEngineConfig, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference import weight_update
from arealite.inference.pool import ServerFacts
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.processes import REGISTRY_VARIABLE
from arealite.weights.publish import publish_weights

PROMPT = [5, 9, 13, 4]


class WatchedServer(LiteServer):
    """Notes each call, may die at one, and keeps the versions of the tokens that it sampled."""

    def __init__(self, *, seed: int = 3, dies_at: str = "", **config: Any) -> None:
        super().__init__(tiny_models.build(tiny_models.config(**config), seed=seed))
        self.dies_at = dies_at
        self.sick_at = ""
        self.calls: list[str] = []
        self.connections: list[tuple[asyncio.AbstractEventLoop, asyncio.Transport]] = []
        self.is_dead = False

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.insert(0, self._watch)
        return app

    @web.middleware
    async def _watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.transport is not None
        self.calls.append(request.path)
        self.connections.append((asyncio.get_running_loop(), request.transport))
        self.is_dead |= request.path == self.dies_at
        if self.is_dead:
            request.transport.abort()
            return web.Response()
        if request.path == self.sick_at:
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        response: web.StreamResponse = await handler(request)
        return response

    def kill(self) -> None:
        """Cut all connections, and answer nobody any more."""
        self.is_dead = True
        for loop, transport in self.connections:
            loop.call_soon_threadsafe(transport.abort)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRegistry]:
    one = RunningRegistry()
    monkeypatch.setenv(REGISTRY_VARIABLE, one.address)
    yield one
    one.close()


def serving(stack: ExitStack, **options: Any) -> WatchedServer:
    return stack.enter_context(serve(WatchedServer(**options)))


def start(
    stack: ExitStack, model_path: str, num_servers: int, **config: Any
) -> tuple[FSDPPPOActor, RemoteInferenceEngine]:
    actor = FSDPPPOActor(PPOActorConfig(path=model_path, dtype="float32", optimizer=OptimizerConfig(lr=0.01)))
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    stack.callback(actor.destroy)
    settings = {"setup_timeout": LIMIT_S, "weight_update_timeout": 20.0, "consumer_batch_size": 4, **config}
    rollout = RemoteInferenceEngine(
        InferenceEngineConfig(backend="lite", num_servers=num_servers, episode_retries=0, **RUN, **settings)
    )
    rollout.initialize(None, None)
    stack.callback(rollout.destroy)
    return actor, rollout


def rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [*PROMPT, 3 + index]} for index in range(count)]


def test_a_server_that_joins_gets_the_weights_before_its_first_token(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    """While the trainer waits for a batch; the others go on."""
    first, second = serving(stack), serving(stack, seed=8)
    registry.put("server-0", first.address)
    actor, rollout = start(stack, model_path, 1)
    publish_weights(actor, rollout, version=4)
    first.calls.clear()
    registry.put("server-1", second.address)
    workflow = SamplingWorkflow(max_new_tokens=100, min_new_tokens=100)
    while "/generate" not in second.calls[:-10]:
        assert len(first.calls) < 400
        batch = rollout.rollout_batch(rows(16), workflow)
        assert set(batch["versions"][batch["loss_mask"].bool()].tolist()) == {4}
    assert "/end_weight_update" in second.calls[: second.calls.index("/generate")]
    assert "/pause_generation" not in first.calls, "the others go on"
    assert second.engine.version == "4"
    assert rollout.metrics()["servers/live"] == 2 and rollout.metrics()["servers/joined"] == 1
    assert rollout.stats.failed == 0


@pytest.mark.parametrize(("num_requests", "num_moved"), [(16, 0), (8, 4)])
def test_a_server_that_joins_gets_what_waits_for_a_slot_or_its_share_of_the_rest(
    stack: ExitStack, registry: RunningRegistry, model_path: str, num_requests: int, num_moved: int
) -> None:
    first, second = serving(stack), serving(stack, seed=8)
    registry.put("server-0", first.address)
    actor, rollout = start(stack, model_path, 1, max_concurrent_rollouts=16)
    publish_weights(actor, rollout, version=4)
    for server in (first, second):
        slow_down(server.model)
    first.calls.clear()
    workflow = SamplingWorkflow(max_new_tokens=200, min_new_tokens=200)
    pending = stack.enter_context(in_background(lambda: rollout.rollout_batch(rows(num_requests), workflow)))
    until(lambda: first.engine.stats().running == 8)
    assert first.calls.count("/generate") == 8, "as many as it has slots"
    registry.put("server-1", second.address)
    until(lambda: second.engine.stats().running == num_requests - 8 + num_moved)
    assert [one.num_in_flight for one in rollout.servers.servers] == [8 - num_moved, num_requests - 8 + num_moved]
    assert pending.result(LIMIT_S).batch_size[0] == num_requests
    assert first.calls.count("/generate") == 8 and rollout.stats.failed == 0


def test_nothing_fails_while_the_only_server_starts_anew(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    """Its requests wait, though longer than an episode may take, and go on from their last tokens."""
    registry.put("server-0", (first := serving(stack)).address)
    actor, rollout = start(stack, model_path, 1, episode_timeout=8.0, request_retries=0)
    publish_weights(actor, rollout, version=2)
    slow_down(first.model)
    workflow = SamplingWorkflow(max_new_tokens=150, min_new_tokens=150)
    pending = stack.enter_context(in_background(lambda: rollout.rollout_batch(rows(16), workflow)))
    until(lambda: first.engine.stats().generated_tokens > 60)
    registry.drop("server-0")
    until(lambda: not rollout.servers.servers)
    first.engine.pause("abort").result(120)
    until(lambda: first.engine.stats().running == 0)
    time.sleep(8.5)
    second = serving(stack, seed=8)
    registry.put("server-0", second.address, life=2)
    batch = pending.result(LIMIT_S)
    assert batch.batch_size[0] == 16 and set(batch["versions"][batch["loss_mask"].bool()].tolist()) == {2}
    sampled = first.engine.stats().generated_tokens + second.engine.stats().generated_tokens
    assert 0 < second.engine.stats().generated_tokens < 16 * 150 + 16
    assert 0 <= sampled - 16 * 150 <= 2 * 16, "no token was sampled twice; two canaries"
    assert rollout.metrics().get("rollout/failed_timeout", 0) == 0 and rollout.stats.failed == 0


def test_a_server_that_dies_loses_only_what_it_had(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    dies, stays = serving(stack), serving(stack)
    registry.put("server-0", dies.address)
    registry.put("server-1", stays.address)
    actor, rollout = start(stack, model_path, 2, max_concurrent_rollouts=8, consumer_batch_size=8)
    publish_weights(actor, rollout, version=1)
    for server in (dies, stays):
        server.calls.clear()
        slow_down(server.model)
    workflow = SamplingWorkflow(max_new_tokens=150, min_new_tokens=150)
    pending = stack.enter_context(in_background(lambda: rollout.rollout_batch(rows(8), workflow)))
    until(lambda: dies.engine.stats().running == 4 and stays.engine.stats().running == 4)
    dies.kill()
    assert pending.result(LIMIT_S).batch_size[0] == 8
    assert dies.calls.count("/generate") == 4 and stays.calls.count("/generate") == 8
    assert rollout.stats.failed == 0 and rollout.metrics()["servers/live"] == 1


@pytest.mark.parametrize(
    ("way", "moment"),
    [
        ("disk", "/update_weights_from_disk"),
        ("disk", "/generate"),
        ("broadcast", "/pause_generation"),
        ("broadcast", "/init_weights_update_group"),
        ("broadcast", "/update_weights_from_distributed"),
        ("broadcast", "/end_weight_update"),
    ],
)
def test_a_publication_is_done_again_without_who_dies_in_it(
    stack: ExitStack, registry: RunningRegistry, model_path: str, way: str, moment: str, tmp_path: Path
) -> None:
    stays, dies = serving(stack), serving(stack, dies_at=moment)
    (tmp_path / "runs" / "exp" / "t").mkdir(parents=True)
    registry.put("server-0", stays.address)
    registry.put("server-1", dies.address)
    actor, rollout = start(stack, model_path, 2, weight_update=way, fileroot=str(tmp_path / "runs"))
    rollout.config.weight_update_timeout = 5.0  # the group of a server that only plays dead stays connected
    publish_weights(actor, rollout, version=1)
    assert dies.is_dead and stays.engine.version == "1"
    batch = rollout.rollout_batch(rows(4), SamplingWorkflow(max_new_tokens=8))
    assert set(batch["versions"][batch["loss_mask"].bool()].tolist()) == {1}
    assert rollout.metrics()["servers/live"] == 1 and rollout.stats.failed == 0


def test_a_publication_waits_for_a_server_when_its_last_one_dies(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    dies, comes = serving(stack, dies_at="/begin_weight_update"), serving(stack)
    registry.put("server-0", dies.address)
    actor, rollout = start(stack, model_path, 1, weight_update_timeout=5.0)
    pending = stack.enter_context(in_background(lambda: publish_weights(actor, rollout, version=1)))
    until(lambda: dies.is_dead)
    registry.put("server-1", comes.address)
    pending.result(LIMIT_S)
    assert comes.engine.version == "1" and rollout.get_version() == 1


def test_a_server_that_fails_in_every_update_ends_the_run_after_setup_timeout(
    stack: ExitStack, registry: RunningRegistry, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is always back before `setup_timeout` has passed since its last failure."""
    sick = serving(stack)
    registry.put("server-0", sick.address)
    actor, rollout = start(stack, model_path, 1)
    publish_weights(actor, rollout, version=1)
    monkeypatch.setattr(weight_update, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(weight_update, "_MAX_PAUSE_S", 0.2)
    rollout.config.setup_timeout, rollout.config.weight_update_timeout = 4.0, 2.0
    sick.calls.clear()
    sick.sick_at = "/begin_weight_update"
    with pytest.raises(WeightUpdateError, match="CUDA error"):
        publish_weights(actor, rollout, version=2)
    assert sick.calls.count("/begin_weight_update") > 2, "it was tried again"
    sick.sick_at = ""
    publish_weights(actor, rollout, version=2)
    assert sick.engine.version == "2"


@pytest.mark.parametrize("moment", ["/begin_weight_update", "/generate", "the shapes of its weights"])
def test_who_can_not_catch_up_is_left_alone_and_the_run_goes_on(
    stack: ExitStack,
    registry: RunningRegistry,
    model_path: str,
    moment: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, sick = serving(stack), serving(stack) if moment.startswith("/") else serving(stack, hidden_size=16)
    registry.put("server-0", good.address)
    actor, rollout = start(stack, model_path, 1)
    publish_weights(actor, rollout, version=1)
    sick.sick_at = moment
    registry.put("server-1", sick.address)
    until(lambda: len(rollout.servers.servers) == 2)
    workflow = SamplingWorkflow(max_new_tokens=100, min_new_tokens=100)
    for _ in range(2):
        assert rollout.rollout_batch(rows(8), workflow).batch_size[0] == 8
    told = f"server {sick.address} failed in a weight update and gets none for 5 s"
    assert sum(told in line for line in caplog.messages) == 1, "no hot loop"
    assert rollout.stats.failed == 0 and [one.address for one in rollout.servers.serving] == [good.address]
    publish_weights(actor, rollout, version=2)
    assert [one.address for one in rollout.servers.serving] == [good.address], "it may not end the run either"


def test_a_server_that_may_hold_half_of_the_weights_is_no_newcomer(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    """A newcomer of another shape tears the update of servers that do not keep their old weights."""
    good = serving(stack)
    registry.put("server-0", good.address)
    actor, rollout = start(stack, model_path, 1, weight_update_timeout=5.0)
    rollout._backend.keeps_old_weights = False
    publish_weights(actor, rollout, version=1)
    registry.put("server-1", serving(stack, hidden_size=16).address)
    until(lambda: len(rollout.servers.servers) == 2)
    publish_weights(actor, rollout, version=2)
    assert [(one.address, one.version) for one in rollout.servers.serving] == [(good.address, 2)]


def test_nobody_catches_up_with_weights_that_were_trained_since(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    registry.put("server-0", serving(stack).address)
    actor, rollout = start(stack, model_path, 1, weight_check=WeightCheckConfig(fingerprint=False))
    actor.fingerprint = None  # which takes seconds, and which nobody asked for
    publish_weights(actor, rollout, version=1)
    batch = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT), dtype=torch.bool)}
    actor.train_batch(TensorDict(batch, [1]), lambda logits, _: logits.dense().logsumexp(-1).mean(), lambda _: 1.0)
    registry.put("server-1", (new := serving(stack)).address)
    until(lambda: len(rollout.servers.servers) == 2)
    rollout.evaluate_batch(rows(8), SamplingWorkflow(max_new_tokens=60, min_new_tokens=60))
    assert new.engine.version != "1" and len(rollout.servers.joining) == 1


def sample_twice(test: Connection, model_path: str, registry: str) -> None:
    """A rank that reports the publication and what it got of two batches."""
    torch.set_num_threads(1)
    os.environ[REGISTRY_VARIABLE] = registry
    with ExitStack() as stack:
        actor, rollout = start(stack, model_path, 1)
        publish_weights(actor, rollout, version=3)
        test.send("published")
        workflow = SamplingWorkflow(max_new_tokens=100, min_new_tokens=100)
        for _ in range(2):
            batch = rollout.rollout_batch(rows(4), workflow)
            test.send((batch.batch_size[0], sorted(set(batch["versions"][batch["loss_mask"].bool()].tolist()))))


def test_all_ranks_help_a_server_to_catch_up(registry: RunningRegistry, model_path: str) -> None:
    """The only server dies in the middle of a batch; the next one gets the weights of both ranks' shards."""
    with serve(WatchedServer()) as first, serve(WatchedServer(seed=8)) as second:
        registry.put("server-0", first.address)
        with testing_forks.two_ranks(sample_twice, model_path, registry.address) as ranks:
            assert [rank.receive() for rank in ranks] == ["published"] * 2
            until(lambda: first.engine.stats().generated_tokens > 60)
            first.kill()
            registry.put("server-1", second.address)
            for _ in range(2):
                assert [rank.receive() for rank in ranks] == [(2, [3])] * 2
            assert [rank.end() for rank in ranks] == [0, 0]
    assert "/end_weight_update" in second.calls[: second.calls.index("/generate")]


def test_servers_that_take_no_broadcast_need_updates_through_the_disk(
    stack: ExitStack, registry: RunningRegistry, model_path: str
) -> None:
    server = serving(stack)
    registry.put("server-0", server.address)
    actor, rollout = start(stack, model_path, 1)
    rollout.servers.servers[0].facts = ServerFacts(takes_broadcasts=False)
    with pytest.raises(WeightUpdateError, match=f"by broadcast: got {server.address}, .* rollout.weight_update=disk"):
        publish_weights(actor, rollout, version=1)
    assert "/update_weights_from_disk" not in server.calls

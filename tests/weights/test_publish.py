"""A trainer and real embedded servers: after a publication the servers' logprobs are those of the trainer's weights."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import tiny_models
import torch
from tensordict import TensorDict
from testing_server import ScriptedServer, serve

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    SaverConfig,
    WeightCheckConfig,
)
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import FinetuneSpec, ModelRequest, WeightUpdateMeta
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.server import __main__ as server
from arealite.utils.network import hold_port, port_of
from arealite.weights.publish import publish_weights

PROMPT = [5, 9, 13, 4]
Server = tuple[str, ForkServerProcess]
Make = Callable[..., tuple[FSDPPPOActor, RemoteSGLangEngine]]

pytestmark = pytest.mark.xdist_group("lite_servers")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def servers(model_path: str) -> Iterator[list[Server]]:
    """Two servers of the initial weights."""
    started: list[Server] = []
    with hold_port() as first, hold_port() as second:
        for port in (port_of(first), port_of(second)):
            argv = ["--model-path", model_path, "--port", str(port), "--context", "128", "--weight-version", "0"]
            started.append((f"127.0.0.1:{port}", testing_forks.start(server.main, argv)))
        yield started
        for _, process in started:
            process.kill()
            process.join()


@pytest.fixture
def make(servers: list[Server], model_path: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Any] = []

    def build(**changes: Any) -> tuple[FSDPPPOActor, RemoteSGLangEngine]:
        torch.set_num_threads(1)
        config = PPOActorConfig(path=model_path, dtype="float32", optimizer=OptimizerConfig(lr=0.05))
        actor = FSDPPPOActor(config)
        actor.initialize(None, FinetuneSpec(1, 10, 1))
        made.append(actor)
        names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
        addresses = [address for address, _ in servers]
        rollout = RemoteSGLangEngine(
            InferenceEngineConfig(backend="lite", server_addrs=addresses, setup_timeout=120, **names, **changes)
        )
        rollout.initialize(None, None)
        made.append(rollout)
        return actor, rollout

    yield build
    for one in reversed(made):
        one.destroy()


def train_a_step(actor: FSDPPPOActor) -> None:
    """Move the weights far enough that logprobs tell them apart."""
    batch = TensorDict(
        {"input_ids": torch.tensor([[*PROMPT, 7, 8]]), "attention_mask": torch.ones(1, 6, dtype=torch.bool)}, [1]
    )
    actor.train()
    actor.train_batch(batch, lambda logits, mb: logits.dense().log_softmax(-1)[:, 7].mean().neg(), lambda mb: 1.0)


def sampled_at_once(rollout: RemoteSGLangEngine, *rids: str) -> list[Any]:
    async def sample() -> list[Any]:
        gconfig = GenerationHyperparameters(max_new_tokens=7)  # too short to tell which server is faster
        return await asyncio.gather(*(rollout.agenerate(ModelRequest(PROMPT, gconfig, rid=rid)) for rid in rids))

    return asyncio.run(sample())


def sampled(rollout: RemoteSGLangEngine, rid: str) -> Any:
    return sampled_at_once(rollout, rid)[0]


def trainers_logprobs(actor: FSDPPPOActor, response: Any) -> list[float]:
    tokens = response.input_tokens + response.output_tokens
    batch = TensorDict(
        {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool)}, [1]
    )
    return actor.compute_logprobs(batch)[0, len(PROMPT) :].tolist()


def check_agreement(actor: FSDPPPOActor, rollout: RemoteSGLangEngine, version: int) -> None:
    """Both servers sample from the trainer's weights and say so."""
    seen = set()
    for response in sampled_at_once(rollout, *(f"{version}-{index}" for index in range(8))):
        seen.add(response.server)
        assert set(response.output_versions) == {version}
        assert response.output_logprobs == pytest.approx(trainers_logprobs(actor, response), abs=1e-4)
    assert len(seen) == 2


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_publish_weights(make: Make, way: str, tmp_path: Path) -> None:
    actor, rollout = make(weight_update=way)
    check_agreement(actor, rollout, 0)
    for version in (1, 2):
        before = trainers_logprobs(actor, sampled(rollout, "old"))
        train_a_step(actor)
        publish_weights(actor, rollout, version=version)
        assert actor.get_version() == rollout.get_version() == version
        after = trainers_logprobs(actor, sampled(rollout, "new"))
        assert before[:1] != pytest.approx(after[:1], abs=1e-2)
        check_agreement(actor, rollout, version)
    assert not list((tmp_path / "exp" / "t").glob("weight_update*")), "the checkpoint is removed"


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_the_explicit_sequence(make: Make, way: str, tmp_path: Path) -> None:
    """One `meta` serves the whole run."""
    actor, rollout = make()
    if way == "disk":
        names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
        meta = WeightUpdateMeta.from_disk(SaverConfig(**names))
    else:
        meta = WeightUpdateMeta.from_fsdp_nccl(AllocationMode.from_str("lite.d2+d1"), actor)
    for version in (1, 2, 3):
        train_a_step(actor)
        rollout.pause()
        future = rollout.update_weights(meta)
        actor.upload_weights(meta)
        future.result(timeout=60)
        rollout.resume()
        actor.set_version(version)
        rollout.set_version(version)
        check_agreement(actor, rollout, version)


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_a_dead_server_is_left_out(make: Make, servers: list[Server], way: str) -> None:
    actor, rollout = make(weight_update=way)
    publish_weights(actor, rollout, version=1)
    _, process = servers[1]
    process.kill()
    process.join()
    train_a_step(actor)
    publish_weights(actor, rollout, version=2)
    assert actor.get_version() == rollout.get_version() == 2
    for index in range(4):
        response = sampled(rollout, f"after-{index}")
        assert response.server == servers[0][0] and set(response.output_versions) == {2}
        assert response.output_logprobs == pytest.approx(trainers_logprobs(actor, response), abs=1e-4)


def test_without_a_live_server_the_publication_fails_before_anything_is_sent(make: Make, servers: list[Server]) -> None:
    actor, rollout = make(weight_update_timeout=600)
    rollout.config.setup_timeout = 1.0
    for _, process in servers:
        process.kill()
        process.join()
    with pytest.raises(WeightUpdateError, match=f"at least one inference server must be reachable.*{servers[1][0]}"):
        publish_weights(actor, rollout, version=1)
    assert actor.get_version() == rollout.get_version() == 0


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_a_publication_is_done_again_without_a_server_that_freezes_in_it(
    make: Make, servers: list[Server], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    actor, rollout = make(weight_update_timeout=5, weight_update=way)
    address, process = servers[1]
    os.kill(process.pid, signal.SIGSTOP)
    train_a_step(actor)
    publish_weights(actor, rollout, version=1)
    assert actor.get_version() == rollout.get_version() == 1
    assert re.search(rf"repeated, without the servers that failed: weights of version 1 .*{address}", caplog.text)
    assert f"server {address} does not answer, others take over" in caplog.text
    response = sampled(rollout, "after")
    assert (response.server, set(response.output_versions)) == (servers[0][0], {1})
    assert response.output_logprobs == pytest.approx(trainers_logprobs(actor, response), abs=1e-4)


def publish_twice(test: Connection, model_path: str, address: str) -> None:
    """Report what came of versions 1 and 2, and wait after each."""
    torch.set_num_threads(1)
    actor = FSDPPPOActor(PPOActorConfig(path=model_path, dtype="float32"))
    actor.initialize(None, None)
    rollout = RemoteSGLangEngine(
        InferenceEngineConfig(backend="lite", server_addrs=[address], weight_check=WeightCheckConfig(canary_tokens=0))
    )
    rollout.initialize(None, None)
    for version in (1, 2):
        try:
            publish_weights(actor, rollout, version)
        except RuntimeError as error:
            test.send(f"{version} {type(error).__name__} {error}")
        else:
            test.send(f"{version} published")
        test.recv()
    assert actor.get_version() == rollout.get_version() == 1
    rollout.destroy()
    actor.destroy()


def test_a_failure_on_rank_0_is_raised_on_every_rank_at_once(model_path: str) -> None:
    """The other rank does not gather weights that nobody sends."""
    with serve(ScriptedServer()) as server, testing_forks.two_ranks(publish_twice, model_path, server.address) as ranks:
        assert [rank.receive() for rank in ranks] == ["1 published"] * 2
        server.refusals = {"/pause_generation": (400, "not today")}
        for rank in ranks:
            rank.pipe.send("go on")
        first, second = (rank.receive() for rank in ranks)
        assert first.startswith("2 WeightUpdateError") and "not today" in first
        assert second.startswith("2 RuntimeError rank 0 failed: WeightUpdateError") and "not today" in second
        for rank in ranks:
            rank.pipe.send("end")
        assert [rank.end() for rank in ranks] == [0, 0]

"""A trainer and real embedded servers: after a publication the servers' logprobs are those of the trainer's weights."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import testing_forks
import tiny_models
import torch
from testing_lite import LiteServer
from testing_server import ScriptedServer, serve
from testing_trainers import PROMPT, train_a_step, trainers_logprobs

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
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.server import __main__ as server
from arealite.utils.network import hold_port, port_of
from arealite.weights.publish import publish_weights

Make = Callable[..., tuple[FSDPPPOActor, RemoteSGLangEngine]]

pytestmark = pytest.mark.xdist_group("lite_servers")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def make(stack: ExitStack, model_path: str, tmp_path: Path) -> Make:
    def build(*addresses: str, **changes: object) -> tuple[FSDPPPOActor, RemoteSGLangEngine]:
        actor = FSDPPPOActor(PPOActorConfig(path=model_path, dtype="float32", optimizer=OptimizerConfig(lr=0.05)))
        actor.initialize(None, FinetuneSpec(1, 10, 1))
        stack.callback(actor.destroy)
        names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
        rollout = RemoteSGLangEngine(
            InferenceEngineConfig(backend="lite", server_addrs=[*addresses], setup_timeout=120, **names, **changes)
        )
        rollout.initialize(None, None)
        stack.callback(rollout.destroy)
        return actor, rollout

    return build


def serving(stack: ExitStack) -> str:
    """Serve the initial weights; return the address."""
    one = LiteServer(tiny_models.build(tiny_models.config(), seed=3), context=128)
    return stack.enter_context(serve(one)).address


def sampled(rollout: RemoteSGLangEngine, *rids: str) -> list[ModelResponse]:
    async def sample() -> list[ModelResponse]:
        gconfig = GenerationHyperparameters(max_new_tokens=7)  # too short to tell which server is faster
        return await asyncio.gather(*(rollout.agenerate(ModelRequest(PROMPT, gconfig, rid=rid)) for rid in rids))

    return asyncio.run(sample())


def check_agreement(actor: FSDPPPOActor, rollout: RemoteSGLangEngine, version: int, num_servers: int = 2) -> set[str]:
    """Check that so many servers sample from the trainer's weights and say so; return which."""
    seen = set()
    for response in sampled(rollout, *(f"{version}-{index}" for index in range(8))):
        seen.add(response.server)
        assert set(response.output_versions) == {version}
        assert response.output_logprobs == pytest.approx(trainers_logprobs(actor, response), abs=1e-4)
    assert len(seen) == num_servers
    return seen


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_the_explicit_sequence(make: Make, stack: ExitStack, way: str, tmp_path: Path) -> None:
    """One `meta` serves the whole run."""
    actor, rollout = make(serving(stack), serving(stack))
    check_agreement(actor, rollout, 0)
    if way == "disk":
        names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
        meta = WeightUpdateMeta.from_disk(SaverConfig(**names))
    else:
        meta = WeightUpdateMeta.from_fsdp_nccl(AllocationMode.from_str("lite.d2+d1"), actor)
    for version in (1, 2):
        (before,) = sampled(rollout, "old")
        train_a_step(actor)
        assert before.output_logprobs[:1] != pytest.approx(trainers_logprobs(actor, before)[:1], abs=1e-2)
        rollout.pause()
        future = rollout.update_weights(meta)
        actor.upload_weights(meta)
        future.result(timeout=60)
        rollout.resume()
        actor.set_version(version)
        rollout.set_version(version)
        check_agreement(actor, rollout, version)


def test_without_a_live_server_the_publication_fails_before_anything_is_sent(make: Make) -> None:
    with ExitStack() as life:
        actor, rollout = make(serving(life), address := serving(life), weight_update_timeout=600)
    rollout.config.setup_timeout = 1.0
    with pytest.raises(WeightUpdateError, match=f"at least one inference server must be reachable.*{address}"):
        publish_weights(actor, rollout, version=1)
    assert actor.get_version() == rollout.get_version() == 0


def test_a_publication_is_done_again_without_a_server_that_freezes_in_it(
    make: Make, stack: ExitStack, model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"127.0.0.1:{port_of(port := stack.enter_context(hold_port()))}"
    argv = ["--model-path", model_path, "--port", str(port_of(port)), "--context", "128", "--weight-version", "0"]
    process = testing_forks.start(server.main, argv)
    stack.callback(process.join)
    stack.callback(process.kill)
    actor, rollout = make(stays := serving(stack), address, weight_update_timeout=5)
    os.kill(process.pid, signal.SIGSTOP)
    train_a_step(actor)
    publish_weights(actor, rollout, version=1)
    assert actor.get_version() == rollout.get_version() == 1
    assert re.search(rf"repeated, without the servers that failed: weights of version 1 .*{address}", caplog.text)
    assert f"server {address} does not answer, others take over" in caplog.text
    assert check_agreement(actor, rollout, 1, num_servers=1) == {stays}


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

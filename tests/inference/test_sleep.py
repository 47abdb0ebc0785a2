"""Servers that give their memory back while the trainer computes: scripted ones that, like the real ones, would end if
they were asked to compute without it, to give it back twice, or to take back what they have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import testing_client
from testing_client import publish_from_disk
from testing_server import ScriptedServer, logprob_at, serve, token_at
from testing_vllm import GENERATE, ScriptedVLLM
from testing_workflows import SamplingWorkflow

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.inference.pool import NO_VERSION
from arealite.inference.remote_engine import RemoteInferenceEngine

PROMPT = [5, 6, 7]
BOTH = {"weights", "kv_cache"}
RELEASE, RESUME, LOAD = "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"
SGLANG_SLEEPS = ["/pause_generation", "/flush_cache", RELEASE]
SGLANG_WAKES = ["/pause_generation", RESUME, LOAD, RESUME, "/continue_generation"]
VLLM_SLEEPS = ["/sleep?level=2&mode=abort"]
VLLM_WAKES = [
    *("/pause?mode=abort", "/wake_up?tags=weights", "reload_weights", "/update_weight_version"),
    *("/reset_prefix_cache", "/wake_up?tags=kv_cache", "/resume"),
]


@contextlib.contextmanager
def connected(*servers: ScriptedServer, **config: Any) -> Iterator[RemoteInferenceEngine]:
    backend = "vllm" if isinstance(servers[0], ScriptedVLLM) else "sglang"
    with testing_client.connected(*servers, backend=backend, servers_sleep=True, **config) as engine:
        for server in servers:
            server.calls.clear()
        yield engine
    assert not any(server.deaths for server in servers)


def update(engine: RemoteInferenceEngine, folder: Path, version: int) -> None:
    publish_from_disk(engine, folder, version)
    engine.set_version(version)


def calls(server: ScriptedServer) -> list[str]:
    return [one for one in server.calls if one != GENERATE]


def generate(engine: RemoteInferenceEngine, max_new_tokens: int = 40) -> ModelResponse:
    request = ModelRequest(PROMPT, GenerationHyperparameters(max_new_tokens=max_new_tokens))
    return asyncio.run(engine.agenerate(request))


@pytest.mark.parametrize(
    ("kind", "sleeps", "wakes"),
    [(ScriptedServer, SGLANG_SLEEPS, SGLANG_WAKES), (ScriptedVLLM, VLLM_SLEEPS, VLLM_WAKES)],
)
def test_memory_is_given_back_between_a_batch_and_the_publication_of_its_update(
    kind: type[ScriptedServer], sleeps: list[str], wakes: list[str], tmp_path: Path
) -> None:
    """Completions in flight wait meanwhile, and then continue with the new weights, each token with its version."""
    servers = kind(holds_at=10), kind(holds_at=10)
    with connected(*servers) as engine:
        pool = ThreadPoolExecutor(4)
        pending = [pool.submit(generate, engine) for _ in range(4)]
        for version in (1, 2):
            for server in servers:
                server.wait_until_held(2)
            engine.sleep()
            for server in servers:
                assert server.asleep == BOTH and server.is_paused and calls(server) == sleeps
            assert [one.version for one in engine.servers.servers] == [NO_VERSION] * 2, "nothing may be asked of them"
            num_requests = [len(server.requests) for server in servers]
            for server in servers:
                server.holds_at = 20 if version == 1 else None
            update(engine, tmp_path / str(version), version)
            for server, asked in zip(servers, num_requests):
                assert calls(server) == [*sleeps, *wakes] and not server.asleep
                assert len(server.requests) >= asked
                server.calls.clear()
        responses = [one.result(120) for one in pending]
    for response in responses:
        assert response.num_interrupts == 2 and set(response.output_versions) == {0, 1, 2}
        assert response.output_versions == sorted(response.output_versions)
        triples = zip(response.output_tokens, range(3, 43), response.output_versions, strict=True)
        assert response.output_logprobs == [logprob_at(*one) for one in triples]
    if kind is ScriptedServer:
        seeds = {one["sampling_params"]["sampling_seed"] for server in servers for one in server.requests}
        expected = sorted([token_at(seed, position) for position in range(3, 43)] for seed in seeds)
        assert sorted(response.output_tokens for response in responses) == expected


def test_a_batch_comes_when_the_servers_sleep_and_no_other_before_the_publication(tmp_path: Path) -> None:
    server, workflow = ScriptedServer(), SamplingWorkflow(max_new_tokens=4)
    rows = [{"input_ids": PROMPT}]
    with connected(server) as engine:
        assert engine.evaluate_batch(rows, workflow)
        assert not server.asleep, "an evaluation is no batch to train on"
        for version in (1, 2):
            batch = engine.rollout_batch(rows, workflow)
            assert batch["versions"].max() == version - 1 and server.asleep == BOTH
            for sampling in (engine.rollout_batch, engine.evaluate_batch):
                with pytest.raises(RuntimeError, match="weights must be published before anything is sampled"):
                    sampling(rows, workflow)
            update(engine, tmp_path / str(version), version)


def test_other_runs_leave_servers_awake() -> None:
    server = ScriptedServer()
    with testing_client.connected(server, backend="sglang") as engine:
        engine.rollout_batch([{"input_ids": PROMPT}], SamplingWorkflow(max_new_tokens=4))
        assert not server.asleep and "/pause_generation" not in server.calls


@pytest.mark.parametrize("kind", [ScriptedServer, ScriptedVLLM])
def test_what_an_update_has_woken_is_not_woken_again(kind: type[ScriptedServer], tmp_path: Path) -> None:
    """It fails once the weights have their memory: the next one loads at once, or the server sleeps again before."""
    server = kind()
    load = LOAD if kind is ScriptedServer else "/collective_rpc"
    with connected(server) as engine:
        for version, sleeps_again in ((1, False), (2, True)):
            engine.sleep()
            server.refusals = {load: (400, "not today")}
            with pytest.raises(WeightUpdateError, match="not today"):
                update(engine, tmp_path / f"failing-{version}", version)
            assert server.asleep == {"kv_cache"} and server.is_paused
            server.refusals = {}
            if sleeps_again:
                engine.sleep()
                assert server.asleep == BOTH
            update(engine, tmp_path / str(version), version)
            assert generate(engine, 4).output_versions == [version] * 4


def test_weights_do_not_come_by_broadcast() -> None:
    with connected(ScriptedServer()) as engine, pytest.raises(ConfigError, match="must get weights by disk: got nccl"):
        engine.update_weights(WeightUpdateMeta("nccl", version=1))


# Failures


def test_a_server_that_keeps_its_memory_ends_the_run_and_gets_no_requests() -> None:
    good, bad = ScriptedServer(), ScriptedServer(refusals={RELEASE: (500, "CUDA error")})
    with connected(good, bad) as engine:
        with pytest.raises(ServerError, match=f"{bad.address}{RELEASE} must succeed: got status 500: .*CUDA error"):
            engine.sleep()
        assert good.asleep == BOTH and not engine.servers.serving


def test_a_server_that_ends_asleep_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        good, dies = stack.enter_context(serve(ScriptedServer())), ScriptedServer()
        life = stack.enter_context(contextlib.ExitStack())
        life.enter_context(serve(dies))
        config = InferenceEngineConfig(server_addrs=[good.address, dies.address], backend="sglang", servers_sleep=True)
        engine = RemoteInferenceEngine(config)
        stack.callback(engine.destroy)
        engine.initialize(None, None)
        engine.sleep()
        life.close()
        update(engine, tmp_path / "1", 1)
        assert f"{dies.address} with unknown weights, removed" in engine.servers.describe()
        assert generate(engine, 4).server == good.address
        engine.sleep()
        assert good.asleep == BOTH, "the memory of one that has ended is free"
        assert not good.deaths


def test_requests_wait_for_the_trainer_as_long_as_for_a_completion() -> None:
    """It may compute for longer than servers may take to start, and whoever waits has a deadline all the same."""
    server = ScriptedServer()
    with connected(server, setup_timeout=0.2, request_timeout=0.5) as engine:
        engine.sleep()
        with pytest.raises(
            ServerError, match=r"within 0\.5 s: got .* unknown weights.* raise rollout\.request_timeout"
        ):
            generate(engine)
        assert not server.requests

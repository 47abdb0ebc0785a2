"""Weights change in the middle of generation: each token's logprob must be that of the version it claims, on the whole
prefix. Version v has random weights of its own, so a wrong version or a key cached under older weights shows."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from testing_client import in_background, until
from testing_lite import LiteServer, logprobs_by, slow_down, weights_of
from testing_server import serve
from tiny_models import build, config
from transformers import DynamicCache, PreTrainedModel

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.inference.backends.base import PauseMode

NUM_VERSIONS = 6


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    torch.set_num_threads(1)
    return [build(config(eos_token_id=None), seed=40 + version) for version in range(NUM_VERSIONS)]


@pytest.fixture(scope="module")
def checkpoints(models: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = [tmp_path_factory.mktemp(f"version_{version}") for version in range(NUM_VERSIONS)]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    return [str(folder) for folder in folders]


def start(stack: ExitStack, *, allow_stale_kv: bool = False) -> LiteServer:
    server = LiteServer(build(config(eos_token_id=None), seed=40), slots=4, allow_stale_kv=allow_stale_kv)
    stack.enter_context(serve(server))
    return server


def connect(stack: ExitStack, *servers: LiteServer, **config: Any) -> RemoteSGLangEngine:
    addresses = [server.address for server in servers]
    engine = RemoteSGLangEngine(InferenceEngineConfig(server_addrs=addresses, backend="lite", **config))
    engine.initialize(None, None)
    stack.callback(engine.destroy)
    return engine


def check_versions(models: list[PreTrainedModel], response: ModelResponse) -> None:
    prompt, output = response.input_tokens, response.output_tokens
    by_version_VT = torch.stack([logprobs_by(model, prompt, output) for model in models])
    assert len(response.output_versions) == len(output) == len(response.output_logprobs)
    claimed_T = by_version_VT[response.output_versions, torch.arange(len(output))]
    assert torch.allclose(torch.tensor(response.output_logprobs), claimed_T, atol=1e-4)


def wait_for_tokens(server: LiteServer, count: int) -> None:
    """Return once a server has sampled so many."""
    until(lambda: server.engine.stats().generated_tokens >= count)


def change_at_random(server: LiteServer, checkpoints: list[str], rng: random.Random) -> None:
    """Bring a server from version to version at moments of its own, in every way there is."""
    for version in range(1, NUM_VERSIONS):
        wait_for_tokens(server, server.engine.stats().generated_tokens + rng.randint(1, 25))
        body = {"model_path": checkpoints[version], "weight_version": str(version)}
        pause = rng.choice(["abort", "retract", "in_place", None])
        if pause is not None:
            server.post("/pause_generation", mode=pause)
        server.post("/update_weights_from_disk", **body)
        if pause is not None:
            server.post("/continue_generation")


@pytest.mark.parametrize("seed", range(2))
def test_versions_are_exact_on_two_servers_that_change_at_different_moments(
    stack: ExitStack, models: list[PreTrainedModel], checkpoints: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    servers = start(stack), start(stack)
    for server in servers:
        slow_down(server.model)
    engine = connect(stack, *servers)
    requests = [
        ModelRequest(
            [rng.randrange(2, 48) for _ in range(rng.randint(1, 20))],
            GenerationHyperparameters(max_new_tokens=rng.randint(40, 200)),
            rid=f"{seed}-{index // 2}",
        )
        for index in range(12)
    ]
    changes = [
        threading.Thread(target=change_at_random, args=(server, checkpoints, random.Random(f"{seed}/{index}")))
        for index, server in enumerate(servers)
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        responses = [pool.submit(lambda one=one: asyncio.run(engine.agenerate(one))) for one in requests]
        for change in changes:
            change.start()
        for change in changes:
            change.join()
        finished = [response.result(120) for response in responses]
    for request, response in zip(requests, finished, strict=True):
        assert response.output_len == request.gconfig.max_new_tokens
        check_versions(models, response)
    assert len({version for response in finished for version in response.output_versions}) >= 4
    assert max(len(set(response.output_versions)) for response in finished) >= 3, "some span several updates"
    assert engine.metrics()["rollout/stale_kv_tokens"] == 0
    assert [server.engine.stats().stale_kv_tokens for server in servers] == [0, 0]


# Keys and values of older weights, where the user allows them


def stale_logprobs(
    old: PreTrainedModel, new: PreTrainedModel, prompt: list[int], output: list[int], num_old: int
) -> torch.Tensor:
    """Score the output by `new` on a cache that `old` filled up to the last token it had processed."""
    tokens, num_cached = [*prompt, *output], len(prompt) + num_old - 1
    with torch.inference_mode():
        cache = DynamicCache()  # the argument that transformers renamed in 5.24
        old(torch.tensor([tokens[:num_cached]]), None, None, cache, use_cache=True)
        rest = torch.tensor([tokens[num_cached:-1]])
        logits = new(rest, None, None, cache, use_cache=True).logits[0]
    return logits.log_softmax(-1)[torch.arange(len(output) - num_old), output[num_old:]]


def test_tokens_on_older_keys_are_counted(
    stack: ExitStack, models: list[PreTrainedModel], checkpoints: list[str]
) -> None:
    server = start(stack, allow_stale_kv=True)
    slow_down(server.model)
    engine = connect(stack, server)
    prompt = [5, 6, 7]
    request = ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=200))
    with in_background(lambda: asyncio.run(engine.agenerate(request))) as pending:
        wait_for_tokens(server, 50)
        server.post("/pause_generation", mode="in_place")
        server.post("/update_weights_from_disk", model_path=checkpoints[1], weight_version="1")
        server.post("/continue_generation")
        response = pending.result(120)
    num_old = response.output_versions.count(0)
    assert 50 <= num_old < 200 and response.num_interrupts == 0
    expected = stale_logprobs(models[0], models[1], prompt, response.output_tokens, num_old)
    new = torch.tensor(response.output_logprobs[num_old:])
    assert torch.allclose(new, expected, atol=1e-4)
    assert not torch.allclose(new, logprobs_by(models[1], prompt, response.output_tokens)[num_old:], atol=1e-2)
    assert engine.metrics()["rollout/stale_kv_tokens"] == 200 - num_old == server.engine.stats().stale_kv_tokens
    fresh = asyncio.run(engine.agenerate(ModelRequest(prompt, GenerationHyperparameters(max_new_tokens=20))))
    check_versions(models, fresh)
    assert engine.metrics()["rollout/stale_kv_tokens"] == 200 - num_old


@pytest.mark.parametrize("pause_mode", ["abort", "retract", "in_place"])
def test_the_pause_mode_says_what_becomes_of_requests_in_flight(
    stack: ExitStack, models: list[PreTrainedModel], tmp_path: Path, pause_mode: PauseMode
) -> None:
    server = start(stack, allow_stale_kv=True)
    slow_down(server.model)
    engine = connect(stack, server, pause_mode=pause_mode)
    request = ModelRequest([5, 6, 7], GenerationHyperparameters(max_new_tokens=240))
    with in_background(lambda: asyncio.run(engine.agenerate(request))) as pending:
        wait_for_tokens(server, 30)
        meta = WeightUpdateMeta("disk", path=str(tmp_path / "w"), timeout_s=120.0)
        future = engine.update_weights(meta)
        (tmp_path / "w").mkdir()
        save_file(weights_of(models[1]), tmp_path / "w" / "model.safetensors")
        meta.transfer.uploaded.set_result(None)
        future.result(120)
        response = pending.result(120)
    num_new = response.output_versions.count(1)
    assert 0 < num_new < 240
    stale = engine.metrics()["rollout/stale_kv_tokens"]
    assert response.num_interrupts == (1 if pause_mode == "abort" else 0)
    assert stale == (num_new if pause_mode == "in_place" else 0)
    if pause_mode != "in_place":
        check_versions(models, response)

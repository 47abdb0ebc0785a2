"""Embedded servers verify what they were sent, and a canary finds what nothing else can."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from aiohttp import web
from safetensors.torch import save_file
from testing_client import in_loop
from testing_lite import LiteServer, weights_of
from testing_server import serve

from arealite.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    WeightCheckConfig,
)
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ParamSpec, WeightUpdateMeta
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.fingerprint import fingerprints
from arealite.utils.weight_transfer import close_group, join_group, send_bucket
from arealite.weights.canary import check_canary
from arealite.weights.log import read_weights, record_weights
from arealite.weights.publish import publish_weights

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)


def lite(stack: ExitStack, seed: int = 3, **options: Any) -> LiteServer:
    server = LiteServer(tiny_models.build(tiny_models.config(), seed=seed), **options)
    stack.enter_context(serve(server))
    return server


def connect(stack: ExitStack, *servers: Any, **config: Any) -> RemoteSGLangEngine:
    """Connect an engine whose `weight_check` is given by keywords that start with `check_`."""
    check = {name.removeprefix("check_"): config.pop(name) for name in list(config) if name.startswith("check_")}
    engine = RemoteSGLangEngine(
        InferenceEngineConfig(
            server_addrs=[one.address for one in servers],
            weight_check=WeightCheckConfig(**check),
            **{"backend": "lite", **config},
        )
    )
    engine.initialize(None, None)
    stack.callback(engine.destroy)
    return engine


def make_actor(stack: ExitStack, model_path: str, **changes: Any) -> FSDPPPOActor:
    actor = FSDPPPOActor(
        PPOActorConfig(path=model_path, optimizer=OptimizerConfig(), **{"dtype": "float32", **changes})
    )
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    stack.callback(actor.destroy)
    return actor


def corrupted(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flip the lowest bit of one element."""
    changed = weights[NAME].clone()
    changed.view(torch.int32)[5, 7] ^= 1
    return weights | {NAME: changed}


def send(meta: WeightUpdateMeta, weights: dict[str, torch.Tensor], told: dict[str, torch.Tensor]) -> None:
    """Be a sender whose bytes may change on the way, by the disk or by broadcast."""
    assert meta.transfer.wants_fingerprints
    meta.transfer.fingerprints |= fingerprints(told)
    if meta.type == "disk":
        assert meta.path is not None
        Path(meta.path).mkdir()
        save_file(weights, Path(meta.path) / "model.safetensors")
    else:
        to = meta.transfer
        args = (*to.meeting_point, 0, to.world_size, to.group_name)
        group = join_group(*args, timeout_s=60)
        for specs in meta.nccl_param_specs:
            send_bucket(group, [weights[spec.name] for spec in specs])
    meta.transfer.uploaded.set_result(None)
    if meta.type != "disk":
        close_group(group)


def update(tmp_path: Path, type_: Any, weights: dict[str, torch.Tensor]) -> WeightUpdateMeta:
    specs = [ParamSpec(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()]
    return WeightUpdateMeta(type_, path=str(tmp_path / "w"), nccl_param_specs=[specs[:9], specs[9:]], timeout_s=60.0)


@pytest.mark.parametrize("type_", ["disk", "nccl"])
def test_a_bit_that_flips_on_the_way_is_found(stack: ExitStack, tmp_path: Path, type_: Any) -> None:
    servers = lite(stack), lite(stack)
    engine = connect(stack, *servers)
    before = weights_of(servers[0].model)
    weights = weights_of(tiny_models.build(tiny_models.config(), seed=9))
    meta = update(tmp_path, type_, weights)
    future = engine.update_weights(meta)
    send(meta, corrupted(weights), told=weights)
    with pytest.raises(WeightUpdateError, match=rf"got 1 of \d+ with other fingerprints, {NAME}. The old weights stay"):
        future.result(120)
    for server in servers:
        assert server.engine.version == "0"
        kept = weights_of(server.model)
        assert all(torch.equal(kept[name], before[name]) for name in before)
    shutil.rmtree(tmp_path / "w", ignore_errors=True)
    future = engine.update_weights(meta)
    send(meta, weights, told=weights)
    future.result(120)
    assert [server.engine.version for server in servers] == ["1", "1"]
    assert torch.equal(weights_of(servers[1].model)[NAME], weights[NAME])
    assert engine.metrics()["weights/mismatched_tensors"] == 0


@pytest.mark.parametrize("type_", ["disk", "nccl"])
def test_a_warning_lets_the_run_go_on(
    stack: ExitStack, tmp_path: Path, type_: Any, caplog: pytest.LogCaptureFixture
) -> None:
    servers = lite(stack), lite(stack)
    engine = connect(stack, *servers, check_on_mismatch="warn")
    weights = weights_of(tiny_models.build(tiny_models.config(), seed=9))
    meta = update(tmp_path, type_, weights)
    future = engine.update_weights(meta)
    send(meta, corrupted(weights), told=weights)
    future.result(120)
    for server in servers:
        assert server.engine.version == "1"
        taken = weights_of(server.model)[NAME]
        assert torch.equal(taken, corrupted(weights)[NAME]) and not torch.equal(taken, weights[NAME])
        assert f"server {server.address} took 1 tensors of version 1 with other fingerprints" in caplog.text
    assert NAME in caplog.text
    assert engine.metrics()["weights/mismatched_tensors"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_a_publication_is_proved_and_logged(
    stack: ExitStack, model_path: str, tmp_path: Path, way: Any, dtype: str
) -> None:
    servers = lite(stack, seed=7), lite(stack, seed=8)
    names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
    actor = make_actor(stack, model_path, dtype=dtype)
    rollout = connect(stack, *servers, weight_update=way, **names)
    publish_weights(actor, rollout, version=4)
    assert [server.engine.version for server in servers] == ["4", "4"]
    gap = rollout.metrics()["policy/canary_gap"]
    assert 0 <= gap < (1e-5 if dtype == "float32" else 0.05)
    assert read_weights(tmp_path / "exp" / "t") == {4: actor.fingerprint()}
    assert not list((tmp_path / "exp" / "t").glob("weight_update*")), "the checkpoint is removed"
    for server in servers:
        assert server.engine.stats().generated_tokens == 8
    log = tmp_path / "exp" / "t" / "weights.jsonl"
    before = log.stat().st_ino
    publish_weights(actor, rollout, version=5)
    assert log.stat().st_ino == before, "a line is added: a log of many steps is not read and written again for each"
    publish_weights(actor, rollout, version=5)
    assert list(read_weights(tmp_path / "exp" / "t")) == [4, 5]


def test_the_log_of_weights_goes_back_with_the_run(tmp_path: Path) -> None:
    config = InferenceEngineConfig(experiment_name="exp", trial_name="t", fileroot=str(tmp_path))
    folder = tmp_path / "exp" / "t"
    folder.mkdir(parents=True)
    for version in range(5):
        record_weights(config, version, f"{version:016x}", threads=2, rises=version > 0)
    record_weights(config, 2, "a" * 16, threads=2, rises=False)
    assert read_weights(folder) == {0: "0" * 16, 1: "0" * 15 + "1", 2: "a" * 16}
    with (folder / "weights.jsonl").open("a") as file:
        file.write('{"version": 3, "finge')
    record_weights(config, 3, "b" * 16, threads=2, rises=False)
    assert [json.loads(line)["version"] for line in (folder / "weights.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    record_weights(config, 0, "c" * 16, threads=2, rises=False)
    assert read_weights(folder) == {0: "c" * 16}
    assert [path.name for path in folder.iterdir()] == ["weights.jsonl"]


# The canary


def swap_behind_our_back(server: LiteServer, version: int) -> None:
    """Give a server other weights under the version that it has."""
    other = weights_of(tiny_models.build(tiny_models.config(), seed=21))
    server.engine.update_weights(other, str(version)).result(120)


def test_a_canary_names_the_server_with_other_weights(
    stack: ExitStack, model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = lite(stack), lite(stack)
    actor, rollout = make_actor(stack, model_path), connect(stack, good, bad)
    publish_weights(actor, rollout, version=1)
    check_canary(actor, rollout, version=1)
    swap_behind_our_back(bad, 1)
    with pytest.raises(WeightUpdateError, match=rf"version 1, .*: {bad.address} differs by \d.*over 8 tokens") as info:
        check_canary(actor, rollout, version=1)
    assert good.address not in str(info.value)
    assert rollout.metrics()["policy/canary_gap"] > 0.5
    rollout.config.weight_check.on_mismatch = "warn"
    with caplog.at_level(logging.WARNING):
        check_canary(actor, rollout, version=1)
    assert f"{bad.address} differs by" in caplog.text
    publish_weights(actor, rollout, version=2)
    assert rollout.metrics()["policy/canary_gap"] < 1e-5 and rollout.get_version() == 2


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_canary_explains_tied_embeddings_on_vllm(stack: ExitStack, tmp_path: Path, is_tied: bool) -> None:
    config = tiny_models.config(tie_word_embeddings=is_tied)
    server = LiteServer(tiny_models.build(config, seed=3))
    stack.enter_context(serve(server))
    tiny_models.build(config, seed=3).save_pretrained(tmp_path)
    actor, rollout = make_actor(stack, str(tmp_path)), connect(stack, server)
    publish_weights(actor, rollout, version=1)
    server.engine.update_weights(weights_of(tiny_models.build(config, seed=21)), "1").result(120)
    with pytest.raises(WeightUpdateError, match=r"differs by .* Look at that server's log"):
        check_canary(actor, rollout, version=1)
    rollout.config.backend = "vllm"  # the connection stays; only the words depend on it now
    cause = "vLLM on a CPU serves wrong logits .* use a model with tie_word_embeddings=false" if is_tied else "Look at"
    with pytest.raises(WeightUpdateError, match=f"differs by .* {cause}"):
        check_canary(actor, rollout, version=1)


def test_a_canary_stops_a_publication_before_versions_advance(stack: ExitStack, model_path: str) -> None:
    server = lite(stack)
    actor, rollout = make_actor(stack, model_path), connect(stack, server, check_canary_bound=1e-12)
    with pytest.raises(WeightUpdateError, match=r"within 1e-12 of the trainer's: .* differs by"):
        publish_weights(actor, rollout, version=1)
    assert actor.get_version() == rollout.get_version() == 0
    request = ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=4))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(lambda: asyncio.run(rollout.agenerate(request)))
        time.sleep(0.2)
        assert not pending.done(), "nothing is sampled from weights that were not proved"
        rollout.resume()
        time.sleep(0.2)
        assert not pending.done(), "not even if the user lets episodes go on"
        rollout.config.weight_check.canary_bound = None
        publish_weights(actor, rollout, version=1)
        assert pending.result(120).output_versions == [1] * 4


def test_wrong_weights_are_not_sent_again_because_a_joining_server_got_them_too(
    stack: ExitStack, model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    servers = lite(stack), lite(stack)
    actor, rollout = make_actor(stack, model_path), connect(stack, *servers, check_canary_bound=1e-12)
    in_loop(rollout, lambda: rollout.servers.mark_weights_lost(rollout.servers.servers[1], 0))
    with pytest.raises(WeightUpdateError, match=rf"{servers[0].address} differs by"):
        publish_weights(actor, rollout, version=1)
    assert "a weight update is repeated" not in caplog.text


def test_a_canary_notices_another_version(stack: ExitStack, model_path: str) -> None:
    server = lite(stack)
    actor, rollout = make_actor(stack, model_path), connect(stack, server)
    publish_weights(actor, rollout, version=1)
    server.engine.update_weights({}, "8", is_partial=True).result(120)
    with pytest.raises(WeightUpdateError, match=f"{server.address} says version 8"):
        check_canary(actor, rollout, version=1)


def test_a_canary_uses_the_temperature_of_training_and_can_be_off(stack: ExitStack, model_path: str) -> None:
    server = lite(stack)
    rollout = connect(stack, server)
    publish_weights(make_actor(stack, model_path, temperature=0.6), rollout, version=1)
    rollout.config.weight_check.canary_tokens = 0
    swap_behind_our_back(server, 1)
    check_canary(make_actor(stack, model_path), rollout, version=1)


def test_a_server_that_is_gone_is_no_fault_of_its_weights(stack: ExitStack, model_path: str) -> None:
    stays, leaves = lite(stack), LiteServer(tiny_models.build(tiny_models.config(), seed=3))
    with serve(leaves):
        actor, rollout = make_actor(stack, model_path), connect(stack, stays, leaves)
        publish_weights(actor, rollout, version=1)
    check_canary(actor, rollout, version=1)
    assert [server.state for server in rollout.servers.servers] == ["serving", "removed"]


class UnluckyServer(LiteServer):
    """Answers its first requests for tokens with status 500."""

    num_failures = 2

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.append(self._fail)
        return app

    @web.middleware
    async def _fail(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/generate" and self.num_failures > 0:
            self.num_failures -= 1
            return web.json_response({"error": {"message": "scripted"}}, status=500)
        response: web.StreamResponse = await handler(request)
        return response


def test_a_canary_has_as_many_tries_as_any_request(stack: ExitStack, model_path: str) -> None:
    server = UnluckyServer(tiny_models.build(tiny_models.config(), seed=3))
    stack.enter_context(serve(server))
    rollout = connect(stack, server)
    publish_weights(make_actor(stack, model_path), rollout, version=1)
    assert server.num_failures == 0 and rollout.metrics()["policy/canary_gap"] < 1e-5


def test_a_server_that_started_anew_idles_until_the_next_weights(stack: ExitStack, model_path: str) -> None:
    stays, leaves = lite(stack), LiteServer(tiny_models.build(tiny_models.config(), seed=3))
    with serve(leaves):
        actor, rollout = make_actor(stack, model_path), connect(stack, stays, leaves)
        publish_weights(actor, rollout, version=5)
    anew = LiteServer(tiny_models.build(tiny_models.config(), seed=3))
    stack.enter_context(serve(anew, int(leaves.address.rpartition(":")[2])))
    answers = [sample(rollout) for _ in range(6)]
    assert answers == [(stays.address, [5] * 4)] * 6
    publish_weights(actor, rollout, version=6)
    answers = [sample(rollout) for _ in range(12)]
    assert {address for address, _ in answers} == {stays.address, anew.address}
    assert all(versions == [6] * 4 for _, versions in answers)


def sample(rollout: RemoteSGLangEngine) -> tuple[str, list[int]]:
    """Return who sampled a completion, and the versions of its tokens."""
    gconfig = GenerationHyperparameters(max_new_tokens=4, min_new_tokens=4)
    answer = asyncio.run(rollout.agenerate(ModelRequest([3, 4, 5], gconfig)))
    return answer.server, answer.output_versions

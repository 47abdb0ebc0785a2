"""The client on a scripted vLLM: the core is the same, so what is tested here is what the backend adds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import testing_client
import torch
from testing_client import in_background, in_loop, publish_from_disk
from testing_senders import Senders
from testing_server import kept_at, logprob_at, token_at
from testing_vllm import ScriptedVLLM

from arealite.api.cli_args import GenerationHyperparameters, WeightCheckConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, ParamSpec, WeightUpdateMeta
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.fingerprint import fingerprints
from arealite.utils.weight_transfer import close_group, join_group, send_bucket

PROMPT = [5, 6, 7]
BUCKETS = [[ParamSpec("a", (2, 3), "float32")], [ParamSpec("b", (4,), "float32")]]


@contextlib.contextmanager
def connected(*servers: ScriptedVLLM, **config: Any) -> Iterator[RemoteInferenceEngine]:
    with testing_client.connected(*servers, backend="vllm", **config) as engine:
        for server in servers:
            server.calls.clear()
        yield engine


def generate(engine: RemoteInferenceEngine, **gconfig: Any) -> ModelResponse:
    return asyncio.run(engine.agenerate(ModelRequest(PROMPT, GenerationHyperparameters(**gconfig))))


def check_exact(response: ModelResponse, asked: list[dict[str, Any]], key: str) -> None:
    """Compare with what an uninterrupted server says, of the seed of each continuation."""
    starts = [len(one[key]) for one in asked]
    seeds = [one.get("sampling_params", one)["seed"] for one in asked]
    assert len(set(seeds)) == len(set(starts)), "vLLM would draw the same random numbers again"
    positions = range(len(PROMPT), len(PROMPT) + response.output_len)
    by_position = [seeds[max(i for i, start in enumerate(starts) if start <= position)] for position in positions]
    assert response.output_tokens == [token_at(*one) for one in zip(by_position, positions)]
    expected = zip(response.output_tokens, positions, response.output_versions, strict=True)
    assert response.output_logprobs == [logprob_at(*one) for one in expected]


def send(meta: WeightUpdateMeta, *values: float) -> None:
    """Be the trainer's half of a broadcast of one bucket per value; too few fail it."""
    to = meta.transfer
    address = (*to.meeting_point, 0, to.world_size, to.group_name)
    group = join_group(*address, timeout_s=meta.timeout_s)
    for specs, value in zip(meta.nccl_param_specs, values):
        tensors = {one.name: torch.full(one.shape, value) for one in specs}
        send_bucket(group, tensors.values())
        meta.transfer.fingerprints |= fingerprints(tensors)
    if len(values) == len(meta.nccl_param_specs):
        meta.transfer.uploaded.set_result(None)
    else:
        close_group(group)
        meta.transfer.uploaded.set_exception(ConnectionError("not today"))


def broadcast(engine: RemoteInferenceEngine, *values: float, version: int = 1) -> None:
    meta = WeightUpdateMeta("nccl", nccl_param_specs=BUCKETS, timeout_s=60.0, version=version)
    received = engine.update_weights(meta)
    send(meta, *values)
    received.result(120)


def test_a_broadcast_from_two_senders_and_then_from_one() -> None:
    server = ScriptedVLLM()
    specs = [[BUCKETS[0][0], BUCKETS[1][0]._replace(owner=1)]]
    weights = {"a": torch.full((2, 3), 3.0), "b": torch.full((4,), 4.0)}
    with connected(server) as engine:
        meta = WeightUpdateMeta("nccl", nccl_param_specs=specs, timeout_s=60.0, version=1)
        received = engine.update_weights(meta)
        senders = Senders(meta)
        meta.transfer.fingerprints = fingerprints(weights)
        senders.send(meta, weights)
        received.result(120)
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())
        (update,) = server.updates
        assert update["group_name"] == [meta.transfer.group_name, f"{meta.transfer.group_name}/rank-1"]
        senders.close()
        broadcast(engine, 5.0, 6.0, version=2)
        assert server.weights["b"].tolist() == [6.0] * 4 and len(server.joins) == 3


def test_interrupted_completions_are_exact() -> None:
    server = ScriptedVLLM(holds_at=10, version=3)
    with connected(server) as engine:
        engine.set_version(3)
        in_loop(engine, lambda: engine.servers.advance(engine.servers.servers, 3))
        with in_background(lambda: generate(engine, max_new_tokens=40, temperature=0.5)) as pending:
            for position in (20, 30, None):
                server.wait_until_held()
                server.abort_all()
                server.holds_at = position
    response = pending.result()
    first = server.requests[0]["sampling_params"]
    assert response.output_len == 40 and response.num_interrupts == len(server.requests) - 1 >= 1
    assert response.output_versions == [3] * 40
    check_exact(response, server.requests, "token_ids")
    assert [one["token_ids"] for one in server.requests] == [
        PROMPT + response.output_tokens[: len(one["token_ids"]) - 3] for one in server.requests
    ]
    assert first["temperature"] == 0.5 and first["top_k"] == -1 and first["logprobs"] == 0


def test_a_server_with_masks_gets_requests_that_it_takes_and_returns_what_it_sampled_from() -> None:
    with connected(ScriptedVLLM(has_mask_flag=True)) as engine:
        narrowed = generate(engine, max_new_tokens=9, top_p=0.9, top_k=50)
        expected = [kept_at(*one) for one in zip(narrowed.output_tokens, range(len(PROMPT), 99))]
        assert narrowed.output_kept == expected
        for sampling in ({}, {"greedy": True}):
            assert generate(engine, max_new_tokens=2, **sampling).output_len == 2
    with connected(ScriptedVLLM()) as engine:
        assert generate(engine, max_new_tokens=9, top_p=0.9, top_k=50).output_kept is None


def test_versions_come_from_the_reply_where_it_tells() -> None:
    """A request that stayed through an update was sampled from two versions, the second on old keys and values."""
    server = ScriptedVLLM(holds_at=10)
    with connected(server, pause_mode="in_place") as engine:
        with in_background(lambda: generate(engine, max_new_tokens=20)) as pending:
            server.wait_until_held()
            server.version, server.holds_at = 1, None
        versions = pending.result().output_versions
        num_new = versions.count(1)
        assert 0 < num_new < 20 and versions == [0] * (20 - num_new) + [1] * num_new
        assert engine.metrics()["rollout/stale_kv_tokens"] == num_new


@pytest.mark.parametrize(
    ("pause_mode", "pause"),
    [
        ("abort", "/pause?mode=abort"),
        ("retract", "/pause?mode=keep"),
        ("in_place", "/pause?mode=keep&clear_cache=false"),
        ("wait", "/pause?mode=wait"),
    ],
)
def test_a_broadcast(pause_mode: str, pause: str) -> None:
    servers = ScriptedVLLM(), ScriptedVLLM()
    with connected(*servers, pause_mode=pause_mode) as engine:
        broadcast(engine, 1.0, 2.0, version=4)
    for server in servers:
        assert server.version == 4 and not server.is_paused
        assert torch.equal(server.weights["a"], torch.full((2, 3), 1.0))
        assert torch.equal(server.weights["b"], torch.full((4,), 2.0))
        assert server.calls == [
            pause,
            "/init_weight_transfer_engine",
            "abandon_weight_update",
            "/start_weight_update",
            "/update_weights",
            "mismatched_weights",
            "/finish_weight_update",
            *(() if pause_mode == "in_place" else ("/reset_prefix_cache",)),
            "/resume",
        ]


def test_damaged_tensors_are_refused_or_counted() -> None:
    refused = pytest.raises(WeightUpdateError, match="as they were sent: got 1 of 2 with other fingerprints, b")
    with connected(ScriptedVLLM(damaged={"b"})) as engine, refused:
        broadcast(engine, 1.0, 2.0)
    accepting = WeightCheckConfig(on_mismatch="warn")
    with connected(ScriptedVLLM(damaged={"b"}), weight_check=accepting) as engine:
        broadcast(engine, 1.0, 2.0)
        assert engine.metrics()["weights/mismatched_tensors"] == 1


def test_a_sender_that_fails_leaves_a_server_that_waits_for_whole_weights() -> None:
    server = ScriptedVLLM()
    with connected(server) as engine:
        with pytest.raises(WeightUpdateError, match="must reach every server"):
            broadcast(engine, 1.0)
        assert server.is_paused and server.calls[-2:] == ["abandon_weight_update", "/shutdown_weight_transfer_engine"]
        broadcast(engine, 3.0, 4.0, version=2)
        assert not server.is_paused and server.version == 2
        assert torch.equal(server.weights["a"], torch.full((2, 3), 3.0))


def test_from_disk(tmp_path: Path) -> None:
    server = ScriptedVLLM()
    with connected(server) as engine:
        publish_from_disk(engine, tmp_path / "checkpoint", 7)
    assert server.weights == {"disk": "7"} and server.version == 7
    calls = ["/pause?mode=abort", "reload_weights", "/update_weight_version", "/reset_prefix_cache", "/resume"]
    assert server.calls == calls


def test_a_checkpoint_that_can_not_be_read_leaves_the_old_weights(tmp_path: Path) -> None:
    """vLLM would go on with empty layers, and die of the next request."""
    server = ScriptedVLLM()
    with connected(server) as engine:
        meta = WeightUpdateMeta("disk", path=str(tmp_path / "nothing"), version=7, timeout_s=60.0)
        received = engine.update_weights(meta)
        meta.transfer.uploaded.set_result(None)
        with pytest.raises(WeightUpdateError, match="collective_rpc must succeed: got status 500"):
            received.result(120)
    assert server.calls[:3] == ["/pause?mode=abort", "reload_weights", "abandon_weight_update"]


def test_a_cache_that_can_not_be_dropped_fails_the_update() -> None:
    refused = pytest.raises(WeightUpdateError, match="/reset_prefix_cache must report success")
    with connected(ScriptedVLLM(can_reset_cache=False)) as engine, refused:
        broadcast(engine, 1.0, 2.0)


def test_a_server_that_has_started_anew_is_noticed() -> None:
    """It says `default` instead of a version, and holds the weights that it started with."""
    servers = ScriptedVLLM(), ScriptedVLLM()
    with connected(*servers) as engine:
        broadcast(engine, 1.0, 2.0)
        assert {sample(engine, rid).server for rid in "abcd"} == {one.address for one in servers}
        servers[0].has_started_anew = True
        assert {sample(engine, rid).server for rid in "efgh"} == {servers[1].address}
        broadcast(engine, 1.0, 2.0, version=2)
        servers[0].has_started_anew = False
        assert {sample(engine, rid).server for rid in "ijklmnopqrst"} == {one.address for one in servers}


def sample(engine: RemoteInferenceEngine, rid: str) -> ModelResponse:
    return asyncio.run(engine.agenerate(ModelRequest(PROMPT, GenerationHyperparameters(max_new_tokens=1), rid=rid)))

"""Publication of weights to real scripted servers: by disk, and by a real broadcast group with a sender in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from testing_client import in_background, in_loop, publish_from_disk, until
from testing_raw import REPLIES
from testing_senders import Senders
from testing_server import ScriptedServer, serve

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import GroupLostError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, ParamSpec, WeightUpdateMeta
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.weight_transfer import BroadcastGroup, close_group, join_group, send_bucket

BUCKETS = [[ParamSpec("a", (2, 3), "float32"), ParamSpec("b", (4,), "bfloat16")], [ParamSpec("c", (1,), "float32")]]


def connect(stack: ExitStack, *servers: ScriptedServer, **config: Any) -> RemoteSGLangEngine:
    """Serve and connect an engine (to embedded servers unless told); the stack takes everything down."""
    torch.set_num_threads(1)
    for server in servers:
        stack.enter_context(serve(server))
    addresses = [server.address for server in servers]
    engine = RemoteSGLangEngine(InferenceEngineConfig(server_addrs=addresses, **{"backend": "lite", **config}))
    engine.initialize(None, None)
    stack.callback(engine.destroy)
    for server in servers:
        server.calls.clear()
    return engine


def add(engine: RemoteSGLangEngine, server: ScriptedServer) -> None:
    """Make a running server a member, as one that registers becomes."""
    engine._require_executor().loop.run(engine._completions.connect([server.address]))


class Sender:
    """The trainer's half: keeps its group for as long as the receiver names the same one."""

    def __init__(self) -> None:
        self.group: BroadcastGroup | None = None
        self.names: list[str] = []

    def send(self, meta: WeightUpdateMeta, value: float) -> None:
        transfer = meta.transfer
        if self.group is None or self.group.name != transfer.group_name:
            args = (*transfer.meeting_point, 0, transfer.world_size, transfer.group_name)
            self.group = join_group(*args, timeout_s=meta.timeout_s)
            self.names.append(self.group.name)
        for specs in meta.nccl_param_specs:
            send_bucket(self.group, [torch.full(one.shape, value, dtype=getattr(torch, one.dtype)) for one in specs])
        meta.transfer.uploaded.set_result(None)


def by_broadcast(timeout_s: float = 60.0, version: int | None = None) -> WeightUpdateMeta:
    return WeightUpdateMeta(type="nccl", nccl_param_specs=BUCKETS, timeout_s=timeout_s, version=version)


def publish(engine: RemoteSGLangEngine, sender: Sender, meta: WeightUpdateMeta, value: float) -> None:
    future = engine.update_weights(meta)
    sender.send(meta, value)
    future.result(120)


def publish_in_vain(engine: RemoteSGLangEngine, meta: WeightUpdateMeta, sender: Sender | None = None) -> None:
    """Send what servers may not take."""

    def send() -> None:
        with contextlib.suppress(ConnectionError):
            (sender or Sender()).send(meta, 1.0)

    future = engine.update_weights(meta)
    with in_background(send):
        future.result(120)


def send_half(sender: Sender, meta: WeightUpdateMeta) -> None:
    """Send the first bucket, and close the group."""
    half = by_broadcast()
    half.nccl_param_specs = BUCKETS[:1]
    half.transfer = dataclasses.replace(meta.transfer, uploaded=Future())
    sender.send(half, 1.0)
    assert sender.group is not None
    close_group(sender.group)


def sample(engine: RemoteSGLangEngine, rid: str = "a") -> ModelResponse:
    return asyncio.run(engine.agenerate(ModelRequest([5], GenerationHyperparameters(max_new_tokens=1), rid=rid)))


def check_weights(server: ScriptedServer, value: float) -> None:
    assert sorted(server.weights) == ["a", "b", "c"]
    assert torch.equal(server.weights["a"], torch.full((2, 3), value))
    assert torch.equal(server.weights["b"], torch.full((4,), value, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["sglang", "lite"])
def test_broadcast_reaches_every_server_and_uses_the_group_again(stack: ExitStack, backend: str) -> None:
    servers = ScriptedServer(), ScriptedServer()
    engine, sender = connect(stack, *servers, backend=backend), Sender()
    for version in (1, 2):
        meta = by_broadcast()
        future = engine.update_weights(meta)
        assert meta.transfer.version == version and meta.transfer.world_size == 3
        sender.send(meta, float(version))
        future.result(120)
        engine.set_version(version)
        for server in servers:
            check_weights(server, float(version))
            assert server.version == version and not server.is_paused
    assert len(sender.names) == 1
    assert servers[0].joins[0].get("timeout_s") == (60.0 if backend == "lite" else None), "only our own are told"
    join, buckets = "/init_weights_update_group", 2 * ["/update_weights_from_distributed"]
    before, after, end = ["/pause_generation"], [], "/end_weight_update"
    if backend == "lite":  # it generates while weights are staged, and pauses when all of them are there
        buckets = buckets[:1]
        before, after = ["/continue_generation"], ["/pause_generation", end]
    update = ["/begin_weight_update", *buckets, end, *after, "/continue_generation"]
    assert servers[0].calls == [*before, join, *update, *before, *update]


@pytest.mark.parametrize(
    ("backend", "groups"), [("lite", [["", "/rank-4", "/rank-4"]]), ("sglang", ["", "/rank-4", "/rank-4"])]
)
def test_two_senders_reach_every_server_at_once_or_one_after_the_other(
    stack: ExitStack, backend: str, groups: list[Any]
) -> None:
    servers = ScriptedServer(), ScriptedServer(tp_size=2, info={"tp_size": 2} if backend == "sglang" else {})
    engine = connect(stack, *servers[: 1 if backend == "lite" else 2], backend=backend)
    (a, b), (c,) = BUCKETS
    meta = by_broadcast()
    meta.nccl_param_specs = [[a, b._replace(owner=4)], [c._replace(owner=4)]]
    senders: Senders | None = None
    for version in (1, 2):
        future = engine.update_weights(meta)
        senders = senders or Senders(meta)
        weights = {one.name: torch.full(one.shape, version, dtype=getattr(torch, one.dtype)) for one in (a, b, c)}
        senders.send(meta, weights)
        future.result(120)
        engine.set_version(version)
        for server in servers[: 1 if backend == "lite" else 2]:
            check_weights(server, float(version))
            assert server.version == version and len(server.joins) == 2
    assert senders is not None
    senders.close()
    update, told = meta.transfer.group_name, [one["group_name"] for one in servers[0].updates]
    assert told == 2 * [[update + name for name in one] if isinstance(one, list) else update + one for one in groups]
    before_last = [None] * (len(groups) - 1)
    assert [one["weight_version"] for one in servers[0].updates] == [*before_last, "1", *before_last, "2"]
    one_sender = by_broadcast()
    publish(engine, Sender(), one_sender, 3.0)
    check_weights(servers[0], 3.0)
    assert len(servers[0].joins) == 3 and servers[0].calls.count("/destroy_weights_update_group") == 2


def test_a_change_of_membership_forms_a_new_group(stack: ExitStack) -> None:
    first, second = ScriptedServer(), ScriptedServer(has_sessions=False)
    engine, sender = connect(stack, first, backend="sglang"), Sender()
    stack.enter_context(serve(second))
    for version, members in ((1, [first]), (2, [first, second]), (3, [second])):
        if version == 2:
            add(engine, second)
            assert {sample(engine, f"before-{index}").server for index in range(4)} == {first.address}
        if version == 3:
            in_loop(engine, functools.partial(engine.servers.remove, first.address))
        publish(engine, sender, by_broadcast(version=version), float(version))
        picked = {sample(engine, f"{version}-{index}").server for index in range(20 * version)}
        assert picked == {one.address for one in members}
        for server in members:
            check_weights(server, float(version))
            assert server.version == version
    assert len(set(sender.names)) == 3
    assert first.version == 2
    assert "/destroy_weights_update_group" in first.calls


def test_every_gpu_of_a_server_has_a_rank(stack: ExitStack) -> None:
    servers = [ScriptedServer(tp_size=2, info={"tp_size": 2}) for _ in range(2)]
    engine, meta = connect(stack, *servers, backend="sglang"), by_broadcast()
    publish(engine, Sender(), meta, 1.0)
    assert meta.transfer.world_size == 5
    assert [(one.joins[0]["rank_offset"], one.joins[0]["world_size"]) for one in servers] == [(1, 5), (3, 5)]
    for server in servers:
        check_weights(server, 1.0)


@pytest.mark.parametrize("type_", ["disk", "nccl"])
def test_a_server_that_is_gone_is_left_out_until_it_is_back(stack: ExitStack, tmp_path: Path, type_: Any) -> None:
    stays, leaves = ScriptedServer(), ScriptedServer()
    engine, sender = connect(stack, stays), Sender()

    def publish_either(version: int) -> None:
        if type_ == "disk":
            publish_from_disk(engine, tmp_path / "w", version)
            assert not (tmp_path / "w").exists(), "the checkpoint is removed"
        else:
            publish(engine, sender, by_broadcast(version=version), float(version))
        engine.set_version(version)

    with serve(leaves):
        add(engine, leaves)
        publish_either(1)
        port = int(leaves.address.rpartition(":")[2])
        assert {sample(engine, f"1-{index}").server for index in range(12)} == {stays.address, leaves.address}
    publish_either(2)
    assert (stays.version, leaves.version) == (2, 1)
    with serve(leaves, port):
        for index in range(4):
            response = sample(engine, f"2-{index}")
            assert (response.server, response.output_versions) == (stays.address, [2])
        until(lambda: all(one.state != "removed" for one in engine.servers.servers))
        publish_either(3)
        assert (stays.version, leaves.version) == (3, 3)
        assert {sample(engine, f"3-{index}").server for index in range(12)} == {stays.address, leaves.address}


def test_no_request_is_sent_while_servers_are_paused(stack: ExitStack) -> None:
    server = ScriptedServer()
    engine, meta = connect(stack, server, backend="sglang"), by_broadcast()
    future = engine.update_weights(meta)
    assert server.is_paused
    with in_background(lambda: sample(engine)) as pending:
        time.sleep(0.3)
        assert server.requests == [] and not pending.done()
        Sender().send(meta, 1.0)
        future.result(120)
        assert pending.result(120).output_versions == [1]


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_requests_are_sent_while_servers_stage_weights(stack: ExitStack, tmp_path: Path, way: str) -> None:
    """They wait only for the swap, before which all servers have staged everything."""
    first, second = ScriptedServer(), ScriptedServer()
    engine = connect(stack, first, second)
    engine.metrics()
    meta = by_broadcast() if way == "broadcast" else WeightUpdateMeta("disk", path=str(tmp_path), timeout_s=60.0)
    began = time.monotonic()
    future = engine.update_weights(meta)
    assert not first.is_paused and sample(engine, "a").output_versions == [0]
    (tmp_path / "weights").write_text("new")
    if way == "broadcast":
        Sender().send(meta, 1.0)
    else:
        meta.transfer.uploaded.set_result(None)
    future.result(120)
    assert sample(engine, "b").output_versions == [1]
    staged, ended = {"broadcast": "/update_weights_from_distributed", "disk": "/update_weights_from_disk"}[way], "/end"
    for server in (first, second):
        *before, pause, swap, resume = server.calls
        assert staged in before and "/pause_generation" not in before
        assert pause == "/pause_generation" and swap.startswith(ended) and resume == "/continue_generation"
    assert 0.0 < engine.metrics()["weights/pause_s"] < time.monotonic() - began
    assert engine.metrics()["weights/pause_s"] == 0.0


@pytest.mark.parametrize("endpoint", ["/pause_generation", "/end_weight_update"])
def test_a_swap_that_fails_leaves_the_others_to_an_update_that_is_repeated(
    stack: ExitStack, tmp_path: Path, endpoint: str
) -> None:
    good, bad = ScriptedServer(), ScriptedServer(refusals={endpoint: (500, "not now")})
    engine = connect(stack, good, bad)
    with pytest.raises(WeightUpdateError, match=f"{bad.address}{endpoint} must succeed: .*not now"):
        publish_from_disk(engine, tmp_path / "1", 1)
    assert [one.state for one in engine.servers.servers] == ["serving", "removed"] and not good.is_paused
    publish_from_disk(engine, tmp_path / "2", 2)
    assert good.weights == {"disk": "2"} and bad.weights == {} and sample(engine).server == good.address


@pytest.mark.parametrize("backend", ["lite", "sglang"])
def test_servers_flush_their_cache_with_the_last_of_the_weights(stack: ExitStack, tmp_path: Path, backend: str) -> None:
    server = ScriptedServer()
    engine = connect(stack, server, backend=backend)
    publish(engine, Sender(), by_broadcast(), 1.0)
    publish_from_disk(engine, tmp_path / "w", 2)
    if backend == "sglang":  # ours does it whenever weights change, of which a call brings all
        assert [update["flush_cache"] for update in server.updates] == [False, True, True]
    assert [update["weight_version"] for update in server.updates] == [*[None][backend == "lite" :], "1", "2"]


# Failures


@pytest.mark.parametrize("endpoint", ["/pause_generation", "/init_weights_update_group", "/begin_weight_update"])
def test_a_server_that_refuses_is_named_and_the_others_go_on(stack: ExitStack, endpoint: str) -> None:
    good, bad = ScriptedServer(), ScriptedServer(refusals={endpoint: (400, "not today")})
    engine, meta = connect(stack, good, bad), by_broadcast(timeout_s=3.0)
    with pytest.raises(WeightUpdateError, match=f"{bad.address}{endpoint} must succeed: got status 400: .*not today"):
        publish_in_vain(engine, meta)
    assert not good.is_paused and good.version == 0 and good.weights == {}
    assert sample(engine).output_len == 1
    bad.refusals.clear()
    meta.timeout_s = 60.0
    publish(engine, Sender(), meta, 1.0)
    check_weights(good, 1.0)
    assert bad.weights == {}, "it is removed"
    (member,) = [one for one in engine.servers.servers if one.state == "removed"]
    assert member.address == bad.address
    in_loop(engine, lambda: engine.servers.restore(member))
    publish(engine, Sender(), meta, 2.0)
    check_weights(good, 2.0)
    check_weights(bad, 2.0)


def test_servers_that_are_paused_need_not_answer_health(stack: ExitStack) -> None:
    """SGLang does not. The one that failed is removed alone."""
    fails, stays = ScriptedServer(refusals={"/begin_weight_update": (500, "out of memory")}), ScriptedServer()
    engine = connect(stack, fails, stays, backend="sglang")
    stays.is_healthy = False
    with pytest.raises(WeightUpdateError, match="out of memory"):
        publish_in_vain(engine, by_broadcast())
    assert [one.state for one in engine.servers.servers] == ["removed", "serving"] and not stays.is_paused


@pytest.mark.parametrize("endpoint", ["/pause_generation", "/update_weights_from_disk"])
@pytest.mark.parametrize("kind", ["ssh", "bad gzip", "redirect"])
def test_a_server_that_speaks_no_http_is_named_and_the_others_go_on(
    stack: ExitStack, tmp_path: Path, kind: str, endpoint: str
) -> None:
    good, bad = ScriptedServer(), ScriptedServer()
    is_first = endpoint == "/pause_generation"
    engine = connect(stack, good, bad, backend="sglang" if is_first else "lite")
    later = ["/continue_generation"] if is_first else ["/pause_generation"]
    bad.raw = dict.fromkeys((endpoint, "/health", *later), REPLIES[kind])
    is_there = not is_first or kind == "redirect"  # if not, the others are updated
    refused = pytest.raises(WeightUpdateError, match=f"http://{bad.address}{endpoint} must ")
    with refused if is_there else contextlib.nullcontext():
        publish_from_disk(engine, tmp_path / "w", 1)
    assert is_there or good.version == 1
    assert not good.is_paused and good.calls[-1] == "/continue_generation"
    assert sample(engine).server == good.address


@pytest.mark.parametrize(("status", "rule"), [(400, "succeed"), (409, "succeed"), (200, "report success")])
def test_wrong_weights_are_known_by_the_status_and_not_by_words(
    stack: ExitStack, tmp_path: Path, status: int, rule: str
) -> None:
    """A server that refuses for another reason backs off; wrong weights are not its fault."""
    refusal = {"/update_weights_from_disk": (status, "a model with other fingerprints")}
    good, bad = ScriptedServer(), ScriptedServer(refusals=refusal)
    engine = connect(stack, good, bad)
    with pytest.raises(WeightUpdateError, match=f"{bad.address}/update_weights_from_disk must {rule}.*other fingerp"):
        publish_from_disk(engine, tmp_path / "w", 1)
    removed = [one.address for one in engine.servers.servers if one.state == "removed"]
    assert removed == ([] if status == 409 else [bad.address]) and not good.is_paused
    assert (tmp_path / "w").exists()


def test_a_checkpoint_that_can_not_be_removed_is_reported_once_all_servers_have_it(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = ScriptedServer()
    engine = connect(stack, server)
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "weights").write_text("seven")
    path = tmp_path / "link"  # which no `rmtree` removes, as it does no folder of NFS in which a file is open
    path.symlink_to(tmp_path / "stored")
    meta = WeightUpdateMeta(type="disk", path=str(path), version=7, timeout_s=60.0)
    future = engine.update_weights(meta)
    meta.transfer.uploaded.set_result(None)
    future.result(120)
    assert server.weights == {"disk": "seven"} and not server.is_paused
    assert any(f"the checkpoint of weights 7 stays in {path}: " in message for message in caplog.messages)


def test_servers_are_told_of_a_group_only_when_its_sender_listens(stack: ExitStack) -> None:
    """SGLang would wait for one that never does, and answer nothing else meanwhile."""
    server = ScriptedServer()
    engine = connect(stack, server)
    future = engine.update_weights(by_broadcast(timeout_s=0.5))
    with pytest.raises(WeightUpdateError, match=r"the sender did not listen: .*Connect call failed"):
        future.result(120)
    assert server.joins == [] and not server.is_paused


def test_after_a_failure_the_group_is_a_new_one(stack: ExitStack) -> None:
    """The sender's is closed, so it must not be named again."""
    server, meta = ScriptedServer(), by_broadcast()
    engine, sender = connect(stack, server), Sender()
    publish(engine, sender, meta, 1.0)
    server.refusals = {"/begin_weight_update": (400, "not today")}
    with pytest.raises(WeightUpdateError):
        publish_in_vain(engine, meta, sender)
    server.refusals.clear()
    publish(engine, sender, meta, 2.0)
    check_weights(server, 2.0)
    assert len(set(sender.names)) == len(sender.names) == 2


def test_a_server_that_may_hold_half_of_a_checkpoint_stays_paused(stack: ExitStack, tmp_path: Path) -> None:
    """Also when the next publication fails before it begins."""
    server = ScriptedServer(refusals={"/update_weights_from_disk": (400, "replaced some")})
    engine = connect(stack, server, backend="sglang")
    meta = WeightUpdateMeta("disk", path=str(tmp_path), timeout_s=5.0)
    for outcome in (None, OSError("disk full")):
        future = engine.update_weights(meta)
        if outcome is None:
            meta.transfer.uploaded.set_result(None)
        else:
            meta.transfer.uploaded.set_exception(outcome)
        with pytest.raises(WeightUpdateError):
            future.result(120)
        assert server.is_paused


def test_a_server_that_may_hold_half_of_a_broadcast_stays_paused(stack: ExitStack) -> None:
    """Also when the next update fails before anything is sent: requests that it holds would go on with the mix."""
    half, bad = ScriptedServer(), ScriptedServer(refusals={"/end_weight_update": (500, "CUDA error")})
    engine = connect(stack, half, bad, backend="sglang")
    with pytest.raises(WeightUpdateError, match="CUDA error"):
        publish(engine, Sender(), by_broadcast(), 1.0)
    assert half.is_paused and half.weights
    half.refusals = {"/init_weights_update_group": (400, "not today")}
    with pytest.raises(WeightUpdateError, match="not today"):
        publish_in_vain(engine, by_broadcast(timeout_s=3.0))
    assert half.is_paused


def test_a_failure_of_one_server_frees_the_sender_at_once(stack: ExitStack) -> None:
    """The good server leaves the group, so the broadcast that waits for it ends long before its deadline."""
    good, bad = ScriptedServer(), ScriptedServer(refusals={"/begin_weight_update": (400, "not today")})
    engine = connect(stack, good, bad)
    meta = by_broadcast(timeout_s=600.0)
    future = engine.update_weights(meta)
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        Sender().send(meta, 1.0)
    with pytest.raises(WeightUpdateError):
        future.result(120)
    assert time.monotonic() - began < 120


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("type_", ["disk", "nccl"])
def test_a_sender_that_fails_ends_the_publication_at_once(stack: ExitStack, type_: Any, error: BaseException) -> None:
    server = ScriptedServer()
    engine = connect(stack, server)
    meta = WeightUpdateMeta(type=type_, path="/nowhere", nccl_param_specs=BUCKETS, timeout_s=600.0)
    future = engine.update_weights(meta)
    time.sleep(0.1)
    meta.transfer.uploaded.set_exception(error)
    with pytest.raises(WeightUpdateError, match=f"the sender failed with {type(error).__name__}"):
        future.result(120)
    assert not server.is_paused and server.version == 0
    assert engine.get_version() == 0


@pytest.mark.parametrize("type_", ["disk", "nccl"])
def test_a_sender_that_never_comes_ends_at_the_deadline(stack: ExitStack, type_: Any) -> None:
    server = ScriptedServer()
    engine = connect(stack, server)
    meta = WeightUpdateMeta(type=type_, path="/nowhere", nccl_param_specs=BUCKETS, timeout_s=0.5)
    with pytest.raises(WeightUpdateError, match=r"within 0\.5 s"):
        engine.update_weights(meta).result(120)
    assert not server.is_paused


def test_a_sender_that_dies_between_buckets_leaves_the_old_weights(stack: ExitStack) -> None:
    server = ScriptedServer()
    engine, sender = connect(stack, server), Sender()
    meta = by_broadcast(timeout_s=20.0)
    future = engine.update_weights(meta)
    send_half(sender, meta)
    with pytest.raises(WeightUpdateError, match=f"{server.address}/update_weights_from_distributed must succeed"):
        future.result(120)
    assert server.weights == {} and server.version == 0 and not server.is_paused


def test_a_sender_whose_workers_are_lost_is_no_fault_of_the_servers(stack: ExitStack) -> None:
    server = ScriptedServer()
    engine, sender = connect(stack, server), Sender()
    meta = by_broadcast(timeout_s=20.0)
    future = engine.update_weights(meta)
    send_half(sender, meta)
    meta.transfer.uploaded.set_exception(GroupLostError("a worker died"))
    with pytest.raises(WeightUpdateError) as raised:
        future.result(120)
    engine.run(engine.receiver.recover(meta, raised.value, time.monotonic()))  # returns: it may be repeated
    publish(engine, Sender(), by_broadcast(), 2.0)
    check_weights(server, 2.0)


def test_a_sender_that_was_started_anew_is_met_in_a_new_group(stack: ExitStack) -> None:
    server = ScriptedServer()
    engine, first, second = connect(stack, server), Sender(), Sender()
    publish(engine, first, by_broadcast(), 1.0)
    known = by_broadcast()
    (known.sender_group,) = first.names
    publish(engine, first, known, 2.0)
    anew = by_broadcast(timeout_s=20.0)
    anew.sender_group = ""
    publish(engine, second, anew, 3.0)
    check_weights(server, 3.0)
    assert len(first.names) == len(second.names) == 1 and first.names != second.names

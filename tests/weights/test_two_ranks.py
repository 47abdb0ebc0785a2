"""A trainer of two ranks publishes whole tensors, bit for bit, from one sender or from two."""

from __future__ import annotations

import contextlib
import json
import re
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import tiny_models
import torch
import torch.distributed as dist
from testing_lite import LiteServer, weights_of
from testing_server import serve
from testing_trainers import train_a_step

from arealite.api.cli_args import InferenceEngineConfig, LoRAConfig, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import FinetuneSpec
from arealite.engine import fsdp_weights
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.weights.log import read_weights
from arealite.weights.publish import publish_weights

pytestmark = pytest.mark.xdist_group("two_ranks")

LORA = LoRAConfig(rank=3, alpha=6)


def lite_server(seed: int) -> LiteServer:
    return LiteServer(tiny_models.build(tiny_models.config(), seed=seed))


@pytest.mark.parametrize(("lora", "num_senders"), [(None, None), (LORA, 2)], ids=["whole", "lora from two"])
def test_two_ranks_publish(tmp_path: Path, lora: LoRAConfig | None, num_senders: int | None) -> None:
    """By broadcast to two servers, again, and with a third that has joined, and through the disk."""
    servers = [lite_server(seed) for seed in (3, 4, 5)]
    before = weights_of(servers[0].model)
    path = tiny_models.save_qwen3(tmp_path / "model", seed=3)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(serve(server)).address for server in servers]
        program = stack.enter_context(
            testing_forks.two_ranks(publish_four_times, path, addresses, tmp_path, lora, num_senders)
        )
        assert [rank.end() for rank in program] == [0, 0]
        served, expected = [weights_of(server.model) for server in servers], torch.load(tmp_path / "params.pt")
    for server, weights in zip(servers, served):
        assert server.engine.version == "4" and set(weights) == set(expected)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    moved = {name for name, tensor in before.items() if (served[0][name] - tensor).abs().max() > 0.01}
    assert moved >= {name for name, tensor in before.items() if (tensor.ndim > 1 if lora is None else "proj" in name)}
    assert lora is None or not any("proj" not in name for name in moved)

    whole = sum(one.nbytes for one in expected.values())
    left_out = sum(one.nbytes for name, one in expected.items() if lora and not ("mlp" in name or "self_attn" in name))
    found = json.loads((tmp_path / "found.json").read_text())
    first, again, joined, disk = found["sent"]
    assert (first, left_out > 0, again, joined) == (whole, lora is not None, whole - left_out, whole)
    assert 0 <= disk - (whole - left_out) < 2**13
    assert found["groups"] == ["", 0, 0, 1, 1], "they are used again, until a server joins"
    assert read_weights(tmp_path / "exp" / "t")[4] == found["fingerprint"]
    for share in found["shares"]:
        largest = max(one.nbytes for one in expected.values())
        assert sum(share) in (whole, whole - left_out) and max(share) - min(share) <= largest
        assert len(share) == (num_senders or 1) and min(share) > 0


def publish_four_times(
    _: Connection, model_path: str, addresses: list[str], out: Path, lora: LoRAConfig | None, num_senders: int | None
) -> None:
    """Fingerprints and a canary prove each."""
    actor, rollout = trainer(model_path, addresses[:2], out, lora=lora, weight_update_senders=num_senders)
    sent, groups = [], [actor.transfer_group]
    for version, way in enumerate(("broadcast", "broadcast", "broadcast", "disk"), start=1):
        rollout.config.weight_update = way
        if version == 3 and dist.get_rank() == 0:  # as one that registers
            rollout._require_executor().loop.run(rollout._completions.connect(addresses[2:]))
        train_a_step(actor)
        publish_weights(actor, rollout, version=version)
        sent.append(rollout.metrics().get("weights/sent_mib", 0.0) * 2**20)
        groups.append(actor.transfer_group)
    names = [*dict.fromkeys(groups[1:])]
    shares = []
    for left_out in (frozenset(), actor.frozen_weights.names if actor.frozen_weights else frozenset()):
        of_rank: dict[int, int] = {}
        for spec in [one for bucket in actor.get_param_specs(num_senders=num_senders) for one in bucket]:
            if spec.name not in left_out:
                of_rank[spec.owner] = of_rank.get(spec.owner, 0) + spec.size
        shares.append([*of_rank.values()])
    params = {name: one.full_tensor().detach().clone() for name, one in actor.model.named_parameters()}
    expected = {name.replace(".base_layer", ""): one for name, one in params.items() if "lora_" not in name}
    for name in [name for name in params if name.endswith("lora_A.default.weight")]:
        layer, b = name.removesuffix("lora_A.default.weight"), params[name.replace("lora_A", "lora_B")]
        expected[f"{layer}weight"] = torch.addmm(expected[f"{layer}weight"], b, params[name], alpha=2.0)
    fingerprint = actor.fingerprint()
    if dist.get_rank() == 0:
        torch.save(expected, out / "params.pt")
        found = {"sent": sent, "shares": shares, "fingerprint": fingerprint}
        found["groups"] = [groups[0], *map(names.index, groups[1:])]
        (out / "found.json").write_text(json.dumps(found))
    rollout.destroy()
    actor.destroy()


def trainer(
    model_path: str, addresses: list[str], out: Path, *, lora: LoRAConfig | None = None, **config: Any
) -> tuple[FSDPPPOActor, RemoteSGLangEngine]:
    torch.set_num_threads(1)
    actor = FSDPPPOActor(
        PPOActorConfig(path=model_path, optimizer=OptimizerConfig(lr=0.05), dtype="float32", lora=lora)
    )
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    names = {"fileroot": str(out), "experiment_name": "exp", "trial_name": "t"}
    check = WeightCheckConfig(canary_bound=1e-5)
    rollout = RemoteSGLangEngine(
        InferenceEngineConfig(server_addrs=addresses, backend="lite", weight_check=check, **names, **config)
    )
    rollout.initialize(None, None)
    return actor, rollout


def test_a_sender_that_is_killed_ends_the_update_and_is_named(tmp_path: Path) -> None:
    """Within the deadline, on the servers and on the other sender; the servers keep their weights."""
    servers = [lite_server(seed) for seed in (3, 4)]
    before = [weights_of(server.model) for server in servers]
    path = tiny_models.save_qwen3(tmp_path / "model", seed=5)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(serve(server)).address for server in servers]
        first, second = stack.enter_context(testing_forks.two_ranks(publish_until_killed, path, addresses, tmp_path))
        assert second.receive() == "half was sent"
        began = time.monotonic()
        second.process.kill()
        error = first.receive()
        assert time.monotonic() - began < 60, "it must not wait for the deadline"
        assert re.search(r"The servers: .* must reach .*broadcast in 'update_weight_group#\w+/rank-1' must", error)
        assert first.end() == 0
        for server, weights in zip(servers, before):
            assert server.engine.version == "0"
            assert all(torch.equal(one, weights[name]) for name, one in weights_of(server.model).items())


def publish_until_killed(pipe: Connection, model_path: str, addresses: list[str], out: Path) -> None:
    """Rank 1 stands still half-way through what it sends; rank 0 reports what becomes of the update."""
    actor, rollout = trainer(model_path, addresses, out, weight_update_senders=2, weight_update_timeout=600.0)
    if dist.get_rank() == 1:
        send = fsdp_weights.send_bucket

        def send_half(group: Any, tensors: list[torch.Tensor], **more: Any) -> None:
            send(group, tensors[: len(tensors) // 2], **more)
            pipe.send("half was sent")
            pipe.recv()

        fsdp_weights.send_bucket = send_half
    try:
        publish_weights(actor, rollout, version=1)
    except Exception as error:
        pipe.send("".join(traceback.format_exception(error)))


def test_after_a_sender_has_failed_all_of_them_meet_in_new_groups(tmp_path: Path) -> None:
    server = lite_server(3)
    path = tiny_models.save_qwen3(tmp_path / "model", seed=5)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(serve(server)).address]
        ranks = stack.enter_context(testing_forks.two_ranks(publish_in_spite_of_a_failure, path, addresses, tmp_path))
        assert all("/rank-1' must finish" in rank.receive() for rank in ranks)
        assert [rank.receive() for rank in ranks] == [2, 2], "groups"
        assert [rank.end() for rank in ranks] == [0, 0]
        expected = weights_of(tiny_models.build(tiny_models.config(), seed=5))
        assert server.engine.version == "1"
        assert all(torch.equal(one, expected[name]) for name, one in weights_of(server.model).items())


def publish_in_spite_of_a_failure(pipe: Connection, model_path: str, addresses: list[str], out: Path) -> None:
    """What rank 1 sends fails once; report why, and in how many groups each rank has sent in the end."""
    actor, rollout = trainer(model_path, addresses, out, weight_update_senders=2)
    send, sent = fsdp_weights.send_bucket, []

    def send_or_fail(group: Any, tensors: list[torch.Tensor], **more: Any) -> None:
        sent.append(group.name)
        if dist.get_rank() == 1 and len(sent) == 1:
            raise OSError("the network is down")
        send(group, tensors, **more)

    fsdp_weights.send_bucket = send_or_fail
    try:
        publish_weights(actor, rollout, version=1)
    except (WeightUpdateError, RuntimeError) as error:
        pipe.send(str(error))
    publish_weights(actor, rollout, version=1)
    pipe.send(len(set(sent)))
    rollout.destroy()
    actor.destroy()

"""Two GPUs over NCCL do what one process does, and weights reach a receiver on another GPU bit for bit."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
import two_rank_program
from testing_server import ScriptedServer, serve
from training_cases import actor_config, of_update, train_config, write_model
from two_rank_program import ACTOR, BATCHES, TRAJECTORIES, TRAJECTORY_SHARES, full_params, ppo_steps, sft_steps

from arealite.api.cli_args import InferenceEngineConfig, WeightCheckConfig
from arealite.api.io_struct import FinetuneSpec, ParamSpec, SaveLoadMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.fingerprint import fingerprint, fingerprints, model_fingerprint
from arealite.utils.network import hold_port, port_of
from arealite.utils.weight_transfer import close_group, join_group, receive_bucket, send_bucket
from arealite.weights.publish import publish_weights

pytestmark = pytest.mark.multi_gpu
SPEC = FinetuneSpec(1, 100, 10)
SPECS = [ParamSpec("a", (1000, 300), "bfloat16"), ParamSpec("b", (7,), "float32")]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {one.name: torch.randn(one.shape, generator=generator).to(getattr(torch, one.dtype)) for one in SPECS}


def train_alone(_: Connection, path: str, resumed_path: str, out: Path) -> None:
    """What one process finds, and the checkpoint that it leaves for two."""
    engine = FSDPEngine(train_config(path))
    engine.initialize(None, SPEC)
    found: dict[str, Any] = {"sft": sft_steps(engine, BATCHES)}
    engine.save(SaveLoadMeta(resumed_path, with_optim=True))
    found["resumed"] = sft_steps(engine, BATCHES)
    engine.destroy()
    actor = FSDPPPOActor(actor_config(path, **ACTOR))
    actor.initialize(None, SPEC)
    found["ppo"] = ppo_steps(actor, TRAJECTORIES.clone())
    actor.destroy()
    torch.save(found, out / "alone.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process and each of two ranks find."""
    out = tmp_path_factory.mktemp("out")
    paths = {name: write_model(out / name, tie=name == "tied") for name in ("tied", "untied")}
    paths["resumed"] = str(out / "resumed")
    with testing_forks.connected(train_alone, paths["tied"], paths["resumed"], out) as process:
        assert process.end() == 0
    with testing_forks.two_ranks(two_rank_program.main, paths, out) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]
    files = {"alone": "alone.pt", 0: "rank0.pt", 1: "rank1.pt"}
    return {key: torch.load(out / file, weights_only=False, map_location="cpu") for key, file in files.items()}


def assert_params_equal(params: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(params) == set(expected)
    for name in expected:
        torch.testing.assert_close(params[name], expected[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("share", "alone"), [("unequal", "sft"), ("empty", "sft"), ("resumed", "resumed")])
def test_steps_on_two_gpus_equal_those_on_one(found: dict[str, Any], rank: int, share: str, alone: str) -> None:
    assert found[rank][share]["losses"] == pytest.approx(found["alone"][alone]["losses"], abs=1e-4)
    assert_params_equal(found[rank][share]["params"], found["alone"][alone]["params"])


@pytest.mark.parametrize("rank", [0, 1])
def test_policy_updates_on_two_gpus_equal_those_on_one(found: dict[str, Any], rank: int) -> None:
    expected = found["alone"]["ppo"]["advantages"][TRAJECTORY_SHARES[rank]]
    torch.testing.assert_close(found[rank]["ppo"]["advantages"], expected, atol=1e-4, rtol=1e-4)
    for metrics, alone in zip(found[rank]["ppo"]["metrics"], found["alone"]["ppo"]["metrics"], strict=True):
        assert of_update(metrics) == pytest.approx(of_update(alone), abs=1e-3, rel=1e-3)


def test_a_fingerprint_of_shards_is_that_of_the_whole(found: dict[str, Any]) -> None:
    whole = model_fingerprint({name: fingerprint(tensor) for name, tensor in found[0]["saved"].items()})
    assert [found[rank]["fingerprint"] for rank in (0, 1)] == [whole] * 2


def receive(test: Connection, port: int) -> None:
    """A receiver outside of the trainer's group, on the second GPU; tells checksums of two transfers."""
    torch.cuda.set_device(1)
    group = join_group("127.0.0.1", port, 1, 2, "weights", backend="nccl", timeout_s=120)
    for _ in range(2):
        received = receive_bucket([(group, spec) for spec in SPECS])
        test.send(fingerprints({name: tensor.cpu() for name, tensor in received.items()}))
    close_group(group)


def send(test: Connection, port: int) -> None:
    torch.cuda.set_device(0)
    group = join_group("127.0.0.1", port, 0, 2, "weights", backend="nccl", timeout_s=120)
    for factor in (1, -1):
        send_bucket(group, [tensor.cuda() * factor for tensor in tensors().values()], timeout_s=120)
    test.recv()  # the receiver has them all
    close_group(group)


def test_a_broadcast_over_nccl_arrives_bit_for_bit_twice() -> None:
    with (
        hold_port() as holder,
        testing_forks.connected(send, port_of(holder)) as sender,
        testing_forks.connected(receive, port_of(holder)) as receiver,
    ):
        for factor in (1, -1):
            assert receiver.receive() == fingerprints({name: one * factor for name, one in tensors().items()})
        sender.pipe.send("done")
        assert [sender.end(), receiver.end()] == [0, 0]


def receive_publications(test: Connection) -> None:
    """A server that speaks SGLang's protocol; tells how it took weights, and their checksums."""
    with serve(ScriptedServer()) as server:
        test.send(server.address)
        while test.recv() == "published":
            found = fingerprints({name: tensor.cpu() for name, tensor in server.weights.items()})
            test.send(([one["backend"] for one in server.joins], server.version, found))


def publish_twice(test: Connection, model_path: str, address: str) -> None:
    actor = FSDPPPOActor(actor_config(model_path, **ACTOR))
    actor.initialize(None, SPEC)
    check = WeightCheckConfig(canary_tokens=0)  # it samples from no model
    rollout = RemoteSGLangEngine(InferenceEngineConfig(server_addrs=[address], weight_check=check, setup_timeout=120))
    rollout.initialize(None, None)
    for version in (1, 2):
        ppo_steps(actor, TRAJECTORIES.clone())
        publish_weights(actor, rollout, version)
        test.send(fingerprints({name: tensor.cpu() for name, tensor in full_params(actor).items()}))
    rollout.destroy()
    actor.destroy()


def test_publications_go_over_nccl_to_a_server_on_another_gpu(tmp_path: Path) -> None:
    path = write_model(tmp_path, tie=False)
    with testing_forks.connected(receive_publications, CUDA_VISIBLE_DEVICES="1") as server:
        with testing_forks.connected(publish_twice, path, server.receive(), CUDA_VISIBLE_DEVICES="0") as trainer:
            for version in (1, 2):
                expected = trainer.receive()
                server.pipe.send("published")
                assert server.receive() == (["nccl"], version, expected)
            assert trainer.end() == 0
        server.pipe.send("end")
        assert server.end() == 0

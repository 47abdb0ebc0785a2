"""A trainer of two ranks publishes whole tensors, bit for bit."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import testing_forks
import tiny_models
import torch
import torch.distributed as dist
from tensordict import TensorDict
from testing_lite import LiteServer, weights_of
from testing_server import serve

from arealite.api.cli_args import InferenceEngineConfig, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.weights.publish import publish_weights

pytestmark = pytest.mark.xdist_group("two_ranks")


def test_two_ranks_publish(tmp_path: Path) -> None:
    server = LiteServer(tiny_models.build(tiny_models.config(), seed=3))
    before = weights_of(server.model)
    path = tiny_models.save_qwen3(tmp_path / "model", seed=3)
    with serve(server), testing_forks.two_ranks(publish_twice, path, server.address, tmp_path) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]
        served, expected = weights_of(server.model), torch.load(tmp_path / "params.pt")
    assert server.engine.version == "2" and set(served) == set(expected)
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    assert all((served[name] - tensor).abs().max() > 0.01 for name, tensor in before.items() if tensor.ndim > 1)


def publish_twice(_: Connection, model_path: str, address: str, out: Path) -> None:
    """Publish by broadcast, then through the disk; fingerprints and a canary prove both."""
    torch.set_num_threads(1)
    actor = FSDPPPOActor(PPOActorConfig(path=model_path, optimizer=OptimizerConfig(lr=0.05), dtype="float32"))
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    names = {"fileroot": str(out), "experiment_name": "exp", "trial_name": "t"}
    check = WeightCheckConfig(canary_bound=1e-5)
    rollout = RemoteSGLangEngine(
        InferenceEngineConfig(server_addrs=[address], backend="lite", weight_check=check, **names)
    )
    rollout.initialize(None, None)
    batch = TensorDict(
        {"input_ids": torch.tensor([[5, 9, 13, 4, 7, 8]]), "attention_mask": torch.ones(1, 6, dtype=torch.bool)}, [1]
    )
    for version, way in enumerate(("broadcast", "disk"), start=1):
        rollout.config.weight_update = way
        actor.train()
        actor.train_batch(batch, lambda logits, mb: logits.dense().log_softmax(-1)[:, 7].mean().neg(), lambda mb: 1.0)
        publish_weights(actor, rollout, version=version)
    expected = {name: one.full_tensor().detach().clone() for name, one in actor.model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(expected, out / "params.pt")
    rollout.destroy()
    actor.destroy()

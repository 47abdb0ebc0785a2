"""A trainer of two ranks publishes whole tensors, bit for bit."""

from __future__ import annotations

import json
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

from arealite.api.cli_args import InferenceEngineConfig, LoRAConfig, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.weights.publish import publish_weights

pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=3, alpha=6)], ids=["whole", "lora"])
def test_two_ranks_publish(tmp_path: Path, lora: LoRAConfig | None) -> None:
    server = LiteServer(tiny_models.build(tiny_models.config(), seed=3))
    before = weights_of(server.model)
    path = tiny_models.save_qwen3(tmp_path / "model", seed=3)
    with serve(server), testing_forks.two_ranks(publish_twice, path, server.address, tmp_path, lora) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]
        served, expected = weights_of(server.model), torch.load(tmp_path / "params.pt")
    assert server.engine.version == "2" and set(served) == set(expected)
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    moved = {name for name, tensor in before.items() if (served[name] - tensor).abs().max() > 0.01}
    assert moved >= {name for name, tensor in before.items() if (tensor.ndim > 1 if lora is None else "proj" in name)}
    assert lora is None or not any("proj" not in name for name in moved)
    whole = sum(one.nbytes for one in expected.values())
    left_out = sum(one.nbytes for name, one in expected.items() if lora and not ("mlp" in name or "self_attn" in name))
    first, second = json.loads((tmp_path / "sent.json").read_text())
    assert (first, left_out > 0) == (whole, lora is not None) and 0 <= second - (whole - left_out) < 2**13


def publish_twice(_: Connection, model_path: str, address: str, out: Path, lora: LoRAConfig | None) -> None:
    """Publish by broadcast, then through the disk; fingerprints and a canary prove both."""
    torch.set_num_threads(1)
    config = PPOActorConfig(path=model_path, optimizer=OptimizerConfig(lr=0.05), dtype="float32", lora=lora)
    actor = FSDPPPOActor(config)
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
    sent = []
    for version, way in enumerate(("broadcast", "disk"), start=1):
        rollout.config.weight_update = way
        actor.train()
        actor.train_batch(batch, lambda logits, mb: logits.dense().log_softmax(-1)[:, 7].mean().neg(), lambda mb: 1.0)
        publish_weights(actor, rollout, version=version)
        sent.append(rollout.metrics().get("weights/sent_mib", 0.0) * 2**20)
    params = {name: one.full_tensor().detach().clone() for name, one in actor.model.named_parameters()}
    expected = {name.replace(".base_layer", ""): one for name, one in params.items() if "lora_" not in name}
    for name in [name for name in params if name.endswith("lora_A.default.weight")]:
        layer, b = name.removesuffix("lora_A.default.weight"), params[name.replace("lora_A", "lora_B")]
        expected[f"{layer}weight"] = torch.addmm(expected[f"{layer}weight"], b, params[name], alpha=2.0)
    if dist.get_rank() == 0:
        torch.save(expected, out / "params.pt")
        (out / "sent.json").write_text(json.dumps(sent))
    rollout.destroy()
    actor.destroy()

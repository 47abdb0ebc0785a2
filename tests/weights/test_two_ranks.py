"""A trainer of two ranks publishes whole tensors, bit for bit. As a program this file is one of the ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from tensordict import TensorDict
from testing_lite import LiteServer, weights_of
from testing_server import serve

from arealite.api.cli_args import InferenceEngineConfig, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.network import free_port
from arealite.weights.publish import publish_weights

pytestmark = pytest.mark.xdist_group("two_ranks")


def test_two_ranks_publish(tmp_path: Path) -> None:
    model = tiny_models.build(tiny_models.config(), seed=3)
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    server, port = LiteServer(model), free_port("127.0.0.1")
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
    }
    path = tiny_models.save_qwen3(tmp_path / "model", seed=3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serve(server))
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(2):
            log = stack.enter_context((tmp_path / f"rank{rank}.log").open("w"))
            variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, __file__, path, server.address, str(tmp_path)]
            ranks.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        codes = [one.wait(120) for one in ranks]
        assert codes == [0, 0], "\n".join((tmp_path / f"rank{rank}.log").read_text() for rank in range(2))
        served, expected = weights_of(server.model), torch.load(tmp_path / "params.pt")
    assert server.engine.version == "2" and set(served) == set(expected)
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    assert all((served[name] - tensor).abs().max() > 0.01 for name, tensor in before.items() if tensor.ndim > 1)


def main(model_path: str, address: str, out: str) -> None:
    """Publish by broadcast, then through the disk; fingerprints and a canary prove both."""
    torch.set_num_threads(1)
    actor = FSDPPPOActor(PPOActorConfig(path=model_path, optimizer=OptimizerConfig(lr=0.05), dtype="float32"))
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    names = {"fileroot": out, "experiment_name": "exp", "trial_name": "t"}
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
        actor.train_batch(batch, lambda logits, mb: logits.logsumexp(-1).mean() - logits[:, 7].mean(), lambda mb: 1.0)
        publish_weights(actor, rollout, version=version)
    expected = {name: one.full_tensor().detach().clone() for name, one in actor.model.named_parameters()}
    if actor.data_parallel_rank == 0:
        torch.save(expected, Path(out) / "params.pt")
    rollout.destroy()
    actor.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])

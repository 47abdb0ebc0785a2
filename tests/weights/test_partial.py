"""With LoRA a server that has had all weights gets only those that can change, and then has all of the trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from tensordict import TensorDict
from testing_lite import LiteServer, weights_of
from testing_server import serve

from arealite.api.cli_args import InferenceEngineConfig, LoRAConfig, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.hf_model import iter_full_params
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.inference import weight_update
from arealite.weights.publish import publish_weights

pytestmark = pytest.mark.xdist_group("lite_servers")

BATCH = TensorDict(
    {"input_ids": torch.tensor([[5, 9, 13, 4, 7, 8]]), "attention_mask": torch.ones(1, 6, dtype=torch.bool)}, [1]
)


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FSDPPPOActor]:
    torch.set_num_threads(1)
    path = tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)
    lora = LoRAConfig(rank=3, alpha=6, target_modules=["q_proj", "v_proj"])
    engine = FSDPPPOActor(PPOActorConfig(path=path, optimizer=OptimizerConfig(lr=0.05), dtype="float32", lora=lora))
    engine.initialize(None, FinetuneSpec(1, 10, 1))
    yield engine
    engine.destroy()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


def other_server() -> LiteServer:
    """Return a server of a model that is the trainer's in no tensor."""
    return LiteServer(tiny_models.build(tiny_models.config(), seed=4))


def connected(stack: contextlib.ExitStack, server: LiteServer, way: str, folder: Path) -> RemoteSGLangEngine:
    names = {"fileroot": str(folder), "experiment_name": "exp", "trial_name": "t"}
    check = WeightCheckConfig(canary_bound=1e-5)
    rollout = RemoteSGLangEngine(
        InferenceEngineConfig(
            **names, server_addrs=[server.address], backend="lite", weight_update=way, weight_check=check
        )
    )
    rollout.initialize(None, None)
    stack.callback(rollout.destroy)
    return rollout


def publish(actor: FSDPPPOActor, rollout: RemoteSGLangEngine, *servers: LiteServer) -> float:
    """Train and publish; check that every weight of the servers is the trainer's, and return the bytes sent."""
    actor.train()
    actor.train_batch(BATCH, lambda logits, mb: logits.dense().log_softmax(-1)[:, 7].mean().neg(), lambda mb: 1.0)
    version = rollout.get_version() + 1
    publish_weights(actor, rollout, version)
    expected = dict(iter_full_params(actor.model, torch.float32))
    for server in servers:
        assert server.engine.version == str(version)
        served = weights_of(server.model)
        assert served.keys() == expected.keys()
        assert [name for name in served if not torch.equal(served[name], expected[name])] == []
    metrics = rollout.metrics()
    assert metrics["weights/mismatched_tensors"] == 0
    return metrics["weights/sent_mib"] * 2**20


def bytes_of(model: torch.nn.Module, part: str = "") -> int:
    return sum(one.nbytes for name, one in model.named_parameters() if part in name)


@pytest.mark.parametrize("way", ["broadcast", "disk"])
def test_what_never_changes_is_sent_once(
    actor: FSDPPPOActor, stack: contextlib.ExitStack, way: str, tmp_path: Path
) -> None:
    first, second = other_server(), other_server()
    stack.enter_context(serve(first))
    rollout = connected(stack, first, way, tmp_path)
    whole, attention = bytes_of(first.model), bytes_of(first.model, "self_attn")
    files = way == "disk" and 2**13  # headers of safetensors
    assert 0 <= publish(actor, rollout, first) - whole <= files
    assert 0 <= publish(actor, rollout, first) - attention <= files < whole - attention
    rollout.servers.suspend(rollout.servers.servers[0])
    rollout.servers.restore(rollout.servers.servers[0])  # maybe as another process
    assert 0 <= publish(actor, rollout, first) - whole <= files
    stack.enter_context(serve(second))
    rollout._require_executor().loop.run(rollout._completions.connect([second.address]))  # it joins
    assert 0 <= publish(actor, rollout, first, second) - whole <= files
    assert 0 <= publish(actor, rollout, first, second) - attention <= files


@pytest.mark.parametrize("way", ["broadcast", "disk"])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_server_that_was_started_anew_gets_all_weights(
    actor: FSDPPPOActor,
    stack: contextlib.ExitStack,
    is_seen: bool,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unseen by the client it refuses to keep what nobody has sent to it, and is not given up for that."""
    monkeypatch.setattr(weight_update, "_FIRST_PAUSE_S", 0.1)
    before, anew = other_server(), other_server()
    with serve(before):
        rollout = connected(stack, before, way, tmp_path)
        publish(actor, rollout, before)
        publish(actor, rollout, before)
        port = int(before.address.rpartition(":")[2])
    stack.enter_context(serve(anew, port))
    if is_seen:
        rollout.servers.suspend(rollout.servers.servers[0])
        rollout.servers.restore(rollout.servers.servers[0])
    assert publish(actor, rollout, anew) >= bytes_of(anew.model)

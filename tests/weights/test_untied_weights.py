"""Servers of an untied copy take a tied trainer's weights. As a program this file is one of two trainer ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from testing_lite import LiteServer, weights_of
from testing_server import serve
from transformers import AutoModelForCausalLM

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import InferenceEngineConfig, OptimizerConfig, PPOActorConfig, SaverConfig, WeightCheckConfig
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.fingerprint import fingerprints
from arealite.utils.network import free_port
from arealite.utils.untied_copy import write_untied_copy
from arealite.weights.canary import check_canary
from arealite.weights.publish import publish_weights

EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
WAYS = pytest.mark.parametrize("way", ["broadcast", "disk"])
pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    torch.set_num_threads(1)
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def untied_path(model_path: str) -> str:
    write_untied_copy(model_path, f"{model_path}.untied")
    return f"{model_path}.untied"


def start(stack: contextlib.ExitStack, path: str) -> LiteServer:
    server = LiteServer(AutoModelForCausalLM.from_pretrained(path).eval())
    stack.enter_context(serve(server))
    return server


def make_actor(stack: contextlib.ExitStack, path: str, **changes: Any) -> FSDPPPOActor:
    config = PPOActorConfig(path=path, optimizer=OptimizerConfig(lr=0.05), **{"dtype": "float32", **changes})
    actor = FSDPPPOActor(config)
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    stack.callback(actor.destroy)
    return actor


def connect(stack: contextlib.ExitStack, address: str, **config: Any) -> RemoteSGLangEngine:
    values = {"backend": "lite", "untie_embeddings": True, "weight_check": WeightCheckConfig(canary_bound=1e-5)}
    engine = RemoteSGLangEngine(InferenceEngineConfig(server_addrs=[address], **(values | config)))
    engine.initialize(None, None)
    stack.callback(engine.destroy)
    return engine


def train_a_step(actor: FSDPPPOActor) -> None:
    batch = TensorDict(
        {"input_ids": torch.tensor([[5, 9, 13, 4, 7, 8]]), "attention_mask": torch.ones(1, 6, dtype=torch.bool)}, [1]
    )
    actor.train()
    actor.train_batch(batch, lambda logits, mb: logits.logsumexp(-1).mean() - logits[:, 7].mean(), lambda mb: 1.0)


def params(actor: FSDPPPOActor) -> dict[str, torch.Tensor]:
    return {name: one.full_tensor().detach().clone() for name, one in actor.model.named_parameters()}


def assert_served(server: LiteServer, expected: dict[str, torch.Tensor]) -> None:
    """The server has the trainer's tensors bit for bit, those of the embeddings twice."""
    served = weights_of(server.model)
    assert OUTPUT not in expected and set(served) == {*expected, OUTPUT}
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    assert torch.equal(served[OUTPUT], expected[EMBEDDINGS])


@WAYS
def test_logprobs_are_the_trainers_after_steps(
    stack: contextlib.ExitStack, model_path: str, untied_path: str, way: Any, tmp_path: Path
) -> None:
    server, actor = start(stack, untied_path), make_actor(stack, model_path)
    names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
    rollout = connect(stack, server.address, weight_update=way, **names)
    before = weights_of(server.model)[OUTPUT]
    for version in (1, 2):
        train_a_step(actor)
        publish_weights(actor, rollout, version=version)
        assert rollout.metrics()["policy/canary_gap"] < 1e-5
        assert_served(server, params(actor))
    assert server.engine.version == "2" and (before - weights_of(server.model)[OUTPUT]).abs().max() > 0.05


@WAYS
def test_without_the_option_an_untied_server_refuses_the_weights(
    stack: contextlib.ExitStack, model_path: str, untied_path: str, way: Any, tmp_path: Path
) -> None:
    server, actor = start(stack, untied_path), make_actor(stack, model_path)
    rollout = connect(stack, server.address, weight_update=way, untie_embeddings=False, fileroot=str(tmp_path))
    train_a_step(actor)
    with pytest.raises(WeightUpdateError, match=r"1 missing, \['lm_head.weight'\]"):
        publish_weights(actor, rollout, version=1)


@WAYS
def test_the_explicit_sequence(
    stack: contextlib.ExitStack, model_path: str, untied_path: str, way: str, tmp_path: Path
) -> None:
    server, actor = start(stack, untied_path), make_actor(stack, model_path)
    rollout = connect(stack, server.address)
    if way == "disk":
        saver = SaverConfig(experiment_name="exp", trial_name="t", fileroot=str(tmp_path))
        meta = WeightUpdateMeta.from_disk(saver, untie_embeddings=True)
    else:
        meta = WeightUpdateMeta.from_fsdp_nccl(AllocationMode.from_str("lite.d1+d1"), actor, untie_embeddings=True)
    train_a_step(actor)
    received = rollout.update_weights(meta)
    actor.upload_weights(meta)
    received.result(30)
    assert_served(server, params(actor))
    expected = params(actor)
    assert meta.fingerprints == fingerprints(expected | {OUTPUT: expected[EMBEDDINGS]})


def test_buckets_hold_both_names_next_to_each_other(stack: contextlib.ExitStack, model_path: str) -> None:
    actor = make_actor(stack, model_path)
    tied, untied = ([one for [one] in actor.get_param_specs(0, untie_embeddings=is_on)] for is_on in (False, True))
    place = [spec.name for spec in tied].index(EMBEDDINGS)
    assert [spec.name for spec in untied[place : place + 2]] == [EMBEDDINGS, OUTPUT]
    assert (untied[place + 1].shape, untied[place + 1].dtype) == (tied[place].shape, tied[place].dtype)
    assert untied[: place + 1] + untied[place + 2 :] == tied


def test_only_the_servers_checkpoint_is_untied(stack: contextlib.ExitStack, model_path: str, tmp_path: Path) -> None:
    actor = make_actor(stack, model_path, dtype="bfloat16")
    actor.upload_weights(WeightUpdateMeta("disk", path=str(tmp_path / "served"), untie_embeddings=True))
    actor.save(SaveLoadMeta(str(tmp_path / "saved")))
    for folder, is_tied in (("served", False), ("saved", True)):
        weights = load_file(tmp_path / folder / "model.safetensors")
        assert (OUTPUT in weights) != is_tied and weights[EMBEDDINGS].dtype == torch.bfloat16
        assert json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"] is is_tied
    served, saved = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("served", "saved"))
    tokens = torch.tensor([[5, 9, 13, 4]])
    assert torch.equal(served(tokens).logits, saved(tokens).logits)
    assert served.lm_head.weight is not served.model.embed_tokens.weight
    assert actor.model.config.tie_word_embeddings is True


def test_an_untied_model_has_nothing_to_untie(stack: contextlib.ExitStack, untied_path: str, tmp_path: Path) -> None:
    actor = make_actor(stack, untied_path)
    with pytest.raises(ValueError, match=r"must have tied embeddings .* Remove rollout.untie_embeddings"):
        actor.get_param_specs(untie_embeddings=True)
    with pytest.raises(ValueError, match="must have tied embeddings"):
        actor.upload_weights(WeightUpdateMeta("disk", path=str(tmp_path / "w"), untie_embeddings=True))


def test_two_ranks_publish(stack: contextlib.ExitStack, model_path: str, untied_path: str, tmp_path: Path) -> None:
    server, port = start(stack, untied_path), free_port("127.0.0.1")
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
    }
    command = [sys.executable, __file__, model_path, server.address, str(tmp_path)]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(2):
        log = stack.enter_context((tmp_path / f"rank{rank}.log").open("w"))
        variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
        stack.callback(ranks[-1].wait)
        stack.callback(ranks[-1].kill)
    codes = [one.wait(100) for one in ranks]
    assert codes == [0, 0], "\n".join((tmp_path / f"rank{rank}.log").read_text() for rank in range(2))
    assert server.engine.version == "2"
    assert_served(server, torch.load(tmp_path / "params.pt"))


# What the canary says


def test_a_canary_tells_of_tied_embeddings_on_vllm(stack: contextlib.ExitStack, model_path: str) -> None:
    server, actor = start(stack, model_path), make_actor(stack, model_path)
    rollout = connect(stack, server.address, untie_embeddings=False)
    publish_weights(actor, rollout, version=1)
    server.engine.update_weights(weights_of(tiny_models.build(tiny_models.config(), seed=21)), "1").result(10)
    assert "rollout.untie_embeddings" not in complaint(actor, rollout)
    rollout.config.backend = "vllm"  # the connection stays; only the words depend on it now
    told = complaint(actor, rollout)
    assert "differs by" in told and "vLLM on a CPU serves wrong logits" in told
    assert "set rollout.untie_embeddings=true" in told
    rollout.config.untie_embeddings = True
    assert "vLLM on a CPU" not in complaint(actor, rollout)


def test_a_canary_does_not_blame_embeddings_that_are_not_tied(stack: contextlib.ExitStack, untied_path: str) -> None:
    server, actor = start(stack, untied_path), make_actor(stack, untied_path)
    rollout = connect(stack, server.address, untie_embeddings=False)
    publish_weights(actor, rollout, version=1)
    other = weights_of(tiny_models.build(tiny_models.config(tie_word_embeddings=False), seed=21))
    server.engine.update_weights(other, "1").result(10)
    rollout.config.backend = "vllm"
    told = complaint(actor, rollout)
    assert "differs by" in told and "vLLM on a CPU" not in told


def complaint(actor: FSDPPPOActor, rollout: RemoteSGLangEngine) -> str:
    with pytest.raises(WeightUpdateError) as info:
        check_canary(actor, rollout, version=1)
    return str(info.value)


def main(model_path: str, address: str, out: str) -> None:
    """Publish by broadcast, then through the disk; fingerprints and a canary prove both."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        actor = make_actor(stack, model_path)
        rollout = connect(stack, address, fileroot=out, experiment_name="exp", trial_name="t")
        for version, way in enumerate(("broadcast", "disk"), start=1):
            rollout.config.weight_update = way
            train_a_step(actor)
            publish_weights(actor, rollout, version=version)
        expected = params(actor)
        if actor.data_parallel_rank == 0:
            torch.save(expected, Path(out) / "params.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

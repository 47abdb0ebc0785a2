"""The embedded server in the trainer's process samples from the actor's own parameters, once they are published."""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import tiny_models
import torch
from tensordict import TensorDict
from testing_lite import LiteServer, slow_down
from testing_server import serve
from testing_trainers import PROMPT, train_a_step, trainers_logprobs
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    LoRAConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from arealite.api.config.rollout import ColocatedConfig
from arealite.api.errors import ServerError
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.colocated import ColocatedServer
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.secret import authorization
from arealite.weights.publish import publish_weights

Pair = tuple[FSDPPPOActor, RemoteInferenceEngine]
Make = Callable[..., Pair]

pytestmark = pytest.mark.xdist_group("lite_servers")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose completions have no other end than their length."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.build(tiny_models.config(eos_token_id=None), seed=3).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(model_path: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Any] = []

    def build(*, actor: dict[str, Any] | None = None, lite: dict[str, Any] | None = None, **changes: Any) -> Pair:
        torch.set_num_threads(1)
        settings = {"path": model_path, "dtype": "float32", "optimizer": OptimizerConfig(lr=0.05)} | (actor or {})
        trainer = FSDPPPOActor(PPOActorConfig(**settings))
        trainer.initialize(None, FinetuneSpec(1, 10, 1))
        made.append(trainer)
        names = {"experiment_name": "exp", "trial_name": "t", "fileroot": str(tmp_path)}
        colocated = ColocatedConfig(path=model_path, **({"context": 256} | (lite or {})))
        rollout = RemoteInferenceEngine(InferenceEngineConfig(backend="lite", colocated=colocated, **names | changes))
        made.append(rollout)
        rollout.initialize(None, None)
        return trainer, rollout

    yield build
    for one in reversed(made):
        one.destroy()


def start(rollout: RemoteInferenceEngine, *rids: str, length: int = 7) -> "Future[list[ModelResponse]]":
    gconfig = GenerationHyperparameters(max_new_tokens=length)

    async def sample() -> list[ModelResponse]:
        return await asyncio.gather(*(rollout.agenerate(ModelRequest(PROMPT, gconfig, rid=rid)) for rid in rids))

    return rollout._require_executor().loop.submit(sample())


def server_of(rollout: RemoteInferenceEngine) -> ColocatedServer:
    assert rollout.colocated is not None
    return rollout.colocated


def check_agreement(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int, gap: float = 1e-4) -> None:
    for response in start(rollout, *(f"{version}-{index}" for index in range(4))).result(60):
        assert set(response.output_versions) == {version}
        assert response.output_logprobs == pytest.approx(trainers_logprobs(actor, response), abs=gap)


def pointers(actor: FSDPPPOActor, rollout: RemoteInferenceEngine) -> list[bool]:
    """Tell of each parameter of the server whether it is the actor's."""
    trained = {name.replace(".base_layer", ""): one for name, one in actor.model.named_parameters()}
    served = server_of(rollout)._engine._runner.model.named_parameters()
    return [trained[name].to_local().data_ptr() == one.data_ptr() for name, one in served]


def test_a_publication_shares_the_parameters(make: Make) -> None:
    actor, rollout = make()
    check_agreement(actor, rollout, 0)
    assert not any(pointers(actor, rollout)), "it has loaded weights of its own"
    for version in (1, 2):
        (before,) = start(rollout, "old").result(60)
        train_a_step(actor)
        publish_weights(actor, rollout, version=version)
        assert all(pointers(actor, rollout))
        assert actor.get_version() == rollout.get_version() == version
        assert before.output_logprobs[:1] != pytest.approx(trainers_logprobs(actor, before)[:1], abs=1e-2)
        check_agreement(actor, rollout, version)


@pytest.mark.parametrize(
    ("actor", "lite", "num_shared", "gap"),
    [
        ({"lora": LoRAConfig(rank=4, target_modules=["q_proj"])}, {}, "some", 1e-4),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, "none", 0.2),
        ({"dtype": "bfloat16"}, {}, "none", 0.2),
    ],
    ids=["adapters", "bfloat16", "rounded"],
)
def test_weights_of_another_kind_are_copied(
    make: Make, actor: dict[str, Any], lite: dict[str, Any], num_shared: str, gap: float
) -> None:
    """Also again and again: the storage that the server took over the first time is its own, and stays where it is."""
    trainer, rollout = make(actor=actor, lite=lite)
    places = []
    for version in (1, 2):
        train_a_step(trainer)
        publish_weights(trainer, rollout, version=version)
        check_agreement(trainer, rollout, version, gap)
        are_shared = pointers(trainer, rollout)
        assert any(are_shared) == (num_shared == "some") and not all(are_shared)
        places.append([one.data_ptr() for one in server_of(rollout)._engine._runner.model.parameters()])
    assert places[0] == places[1], "CUDA graphs hold addresses"


@pytest.mark.parametrize("pause_mode", ["abort", "retract"])
def test_every_token_has_the_version_of_the_weights_that_sampled_it(
    make: Make, model_path: str, pause_mode: str
) -> None:
    """Two optimizer steps happen while a completion runs; what follows is computed anew from its first token on."""
    actor, rollout = make(pause_mode=pause_mode)
    publish_weights(actor, rollout, version=0)
    engine = server_of(rollout)._engine
    slow_down(engine._runner.model)
    running = start(rollout, "long", length=120)
    while engine.stats().generated_tokens < 20:
        engine.call(lambda: None).result(60)  # between two steps
    train_a_step(actor)
    num_tokens, is_held = engine.stats().generated_tokens, engine.stats().is_paused
    train_a_step(actor)
    engine.resume().result(60)  # by whoever
    assert is_held and engine.call(engine.stats).result(60).generated_tokens == num_tokens and not running.done()
    publish_weights(actor, rollout, version=1)
    (response,) = running.result(60)
    versions = response.output_versions
    assert versions == sorted(versions) and set(versions) == {0, 1} and len(versions) == 120
    first_new = versions.index(1)
    old = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens = torch.tensor([response.input_tokens + response.output_tokens])
    with torch.no_grad():
        logprobs = old(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[len(PROMPT) - 1 :, 0]
    assert response.output_logprobs[:first_new] == pytest.approx(logprobs[:first_new].tolist(), abs=1e-4)
    new = trainers_logprobs(actor, response)
    assert response.output_logprobs[first_new:] == pytest.approx(new[first_new:], abs=1e-4)
    assert math.dist(new[:first_new], response.output_logprobs[:first_new]) > 0.1


def test_nothing_waits_for_weights_that_nobody_publishes(make: Make) -> None:
    actor, rollout = make()
    publish_weights(actor, rollout, version=0)
    train_a_step(actor)
    with pytest.raises(RuntimeError, match="weights must be published before anything is sampled from them"):
        rollout.rollout_batch([{}], workflow=None)  # type: ignore[arg-type]


def test_nobody_else_changes_the_trainers_weights(make: Make, model_path: str, tmp_path: Path) -> None:
    actor, rollout = make()
    publish_weights(actor, rollout, version=0)
    before, secret = actor.fingerprint(), (tmp_path / "exp" / "t" / ".secret").read_text().strip()
    url = f"http://{server_of(rollout).address}/update_weights_from_disk"
    headers = {"Content-Type": "application/json", **authorization(secret)}
    body = json.dumps({"model_path": model_path, "weight_version": "7"}).encode()
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(url, body, headers), timeout=60)
    assert refused.value.code == 400 and b"weights must come from the trainer of this process" in refused.value.read()
    assert actor.fingerprint() == before
    check_agreement(actor, rollout, 0)


def test_a_step_that_is_skipped_changes_nothing(make: Make) -> None:
    actor, rollout = make()
    publish_weights(actor, rollout, version=0)
    batch = TensorDict({"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 4, dtype=torch.bool)}, [1])
    actor.train()
    assert actor.train_batch(batch, lambda logits, _: logits.dense().sum(), lambda _: 0.0)["update_successful"] == 0
    check_agreement(actor, rollout, 0)


def test_it_samples_what_a_server_of_its_own_samples(make: Make, model_path: str) -> None:
    """Bit for bit, from weights that were published."""
    actor, rollout = make()
    server = LiteServer(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), context=256)
    with serve(server):
        other = RemoteInferenceEngine(InferenceEngineConfig(backend="lite", server_addrs=[server.address]))
        other.initialize(None, None)
        try:
            train_a_step(actor)
            for one in (other, rollout):
                publish_weights(actor, one, version=1)
            ours, theirs = (start(one, "a", length=64).result(60)[0] for one in (rollout, other))
        finally:
            other.destroy()
    assert ours.output_tokens == theirs.output_tokens and ours.output_logprobs == theirs.output_logprobs


def test_a_run_ends_at_once_when_generation_fails(make: Make) -> None:
    actor, rollout = make()
    publish_weights(actor, rollout, version=0)

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise MemoryError("planted")

    class Asking:
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            await engine.agenerate(ModelRequest(PROMPT, GenerationHyperparameters(max_new_tokens=8)))
            raise AssertionError("nothing can be sampled")

    server_of(rollout)._engine._runner.decode = fail  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="the server in the trainer's process must run") as caught:
        rollout.rollout_batch([{}], Asking())  # type: ignore[arg-type]
    assert "MemoryError: planted" in str(caught.value.__cause__)

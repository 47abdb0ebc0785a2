"""Images over HTTP: what the embedded server samples has the logprobs of the trainer, which has the same pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
import testing_client
import torch
from aiohttp import web
from testing_images import picture, write_model
from testing_lite import LiteServer
from testing_rewards import checksum

from arealite.api.cli_args import GenerationHyperparameters, OptimizerConfig, PPOActorConfig, WeightCheckConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.server.app import Server
from arealite.utils.hf import load_causal_lm, load_hf_tokenizer, load_image_processor
from arealite.utils.images import as_base64
from arealite.weights.publish import publish_weights
from arealite.workflow.vision_rlvr import VisionRLVRWorkflow

PARTS = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "Count."}]
DATA = {
    "messages": [{"role": "user", "content": PARTS}],
    "images": [picture("wide", seed=1), picture("tall", seed=2)],
    "answer": "3",
}
GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=12, temperature=0.7)


class VisionServer(LiteServer):
    """The embedded server of a model that sees images."""

    def __init__(self, path: str, **options: object) -> None:
        model = load_causal_lm(path, dtype=torch.float32, attn_implementation="sdpa")
        super().__init__(model, eos_ids=frozenset({load_hf_tokenizer(path).eos_token_id}), **options)
        self.path = path

    def app(self) -> web.Application:
        processor = load_image_processor(self.path)
        return Server(self.engine, model_path="tiny", image_processor=processor).app


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def workflow(path: str) -> Iterator[VisionRLVRWorkflow]:
    workflow = VisionRLVRWorkflow(checksum, GCONFIG, load_hf_tokenizer(path), load_image_processor(path))
    yield workflow
    workflow.close()


def test_a_group_is_trained_on_with_the_logprobs_that_it_was_sampled_with(
    path: str, workflow: VisionRLVRWorkflow, tmp_path: Path
) -> None:
    """Also after an update of the weights, which changes how the server sees."""
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    actor = FSDPPPOActor(PPOActorConfig(path=path, dtype="float32", optimizer=optimizer, group_size=4, temperature=0.7))
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    names = {"fileroot": str(tmp_path), "experiment_name": "exp", "trial_name": "t"}
    check = WeightCheckConfig(canary_bound=1e-5)
    with testing_client.connected(VisionServer(path), backend="lite", weight_check=check, **names) as rollout:
        before = None
        for version, way in enumerate(("broadcast", "disk"), start=1):
            batch = rollout.rollout_batch([DATA], workflow)
            assert batch["image_grid_thw"].tolist() == [[[1, 4, 8], [1, 6, 4]]] * 4
            assert batch["pixel_values"].shape == (4, 56, 3 * 2 * 14 * 14)
            mask, logprobs = batch["loss_mask"].bool(), actor.compute_logprobs(batch)
            torch.testing.assert_close(batch["logprobs"][mask], logprobs[mask], atol=1e-5, rtol=0)
            assert (batch["versions"][mask] == version - 1).all()
            assert before is None or not torch.equal(before, batch["input_ids"])
            before = batch["input_ids"]
            actor.compute_advantages(batch)
            assert actor.ppo_update(batch)["optim/grad_norm"] > 0
            rollout.config.weight_update = way
            publish_weights(actor, rollout, version=version)
    actor.destroy()


def test_an_interrupted_group_finishes_as_if_nothing_had_happened(path: str, workflow: VisionRLVRWorkflow) -> None:
    """Its images are seen again."""
    found = []
    for num_interrupts in (0, 3):
        server = VisionServer(path, slots=2)
        with testing_client.connected(server, backend="lite") as rollout:

            async def run(server: VisionServer = server, num_interrupts: int = num_interrupts) -> object:
                episode = asyncio.create_task(workflow.arun_episode(rollout, DATA))
                for index in range(num_interrupts):
                    while server.engine.stats().generated_tokens < 5 * index + 3:
                        await asyncio.sleep(0)
                    await asyncio.wrap_future(server.engine.pause("retract" if index else "abort"))
                    await asyncio.wrap_future(server.engine.resume())
                return await episode

            found.append(rollout.run(run()))
    whole, interrupted = found
    assert torch.equal(whole["input_ids"], interrupted["input_ids"])
    torch.testing.assert_close(whole["logprobs"], interrupted["logprobs"], atol=1e-5, rtol=0)


def test_other_images_are_another_prompt(path: str) -> None:
    """Equal tokens with other images share no prefill; the same images make the same completion."""
    server = VisionServer(path)
    text = "<|user|><|vision_start|><|image_pad|><|vision_end|>Count.<|end|><|assistant|>"
    ids = load_hf_tokenizer(path)(text)["input_ids"]
    greedy = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}, "return_logprob": True}
    with testing_client.connected(server, backend="lite"):
        server.engine.pause().result()

        def ask(seed: int) -> list[float]:
            reply = server.post("/generate", input_ids=ids, **greedy, image_data=[as_base64(picture(seed=seed))])
            assert reply["meta_info"]["prompt_tokens"] == len(ids) + 3, "an image of 56 x 56 is four tokens"
            return [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]

        async def ask_all() -> list[list[float]]:
            asked = [asyncio.create_task(asyncio.to_thread(ask, seed)) for seed in (1, 2, 1)]
            while server.engine.stats().waiting < 3:
                await asyncio.sleep(0.01)
            server.engine.resume().result()
            return [await one for one in asked]

        first, second, third = asyncio.run(ask_all())
    assert first == third
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3


def test_images_that_can_not_be_shown_are_refused(path: str) -> None:
    server, encode = VisionServer(path), load_hf_tokenizer(path).encode
    with testing_client.connected(server, backend="lite"):
        for text, image, told in (
            ("Count.", as_base64(picture()), "must have a placeholder for each image: got 0"),
            ("<|image_pad|>", "/etc/passwd", "image_data must be base64 of an image"),
        ):
            with pytest.raises(HTTPError) as raised:
                server.post("/generate", input_ids=encode(text), image_data=[image])
            assert raised.value.code == 400 and told in raised.value.read().decode()

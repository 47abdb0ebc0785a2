"""Shows images to a server: before and after updates of its weights, its logprobs must be those of the trainer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from testing_images import picture, write_model
from testing_rewards import checksum

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, OptimizerConfig, PPOActorConfig
from arealite.api.errors import ServerError
from arealite.api.io_struct import FinetuneSpec, ModelRequest
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.backends.base import Segment
from arealite.inference.http import deadline_in
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.hf import load_hf_tokenizer, load_image_processor
from arealite.utils.images import as_base64
from arealite.utils.token_ids import image_token_id
from arealite.weights.publish import publish_weights
from arealite.workflow.vision_rlvr import VisionRLVRWorkflow
from servers.programs import Program, served

BOUND = 1e-4
CONTENT = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "Count."}]
IMAGES = [picture("wide", 1), picture("tall", 2)]
ROW = {"messages": [{"role": "user", "content": CONTENT}], "images": IMAGES, "answer": "3"}
FLAGS = {"vllm": {"limit_mm_per_prompt": json.dumps({"image": 2, "video": 0})}}


def run(program: Program, folder: Path) -> dict[str, Any]:
    """Sample, continue and update; return how far logprobs are apart at each version, and whether that is too far."""
    path = write_model(folder / "model", tie=False)
    actor = FSDPPPOActor(PPOActorConfig(path=path, dtype="float32", optimizer=OptimizerConfig(lr=1e-2), group_size=3))
    actor.initialize(None, FinetuneSpec(1, 10, 1))
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=16)
    workflow = VisionRLVRWorkflow(checksum, gconfig, load_hf_tokenizer(path), load_image_processor(path))
    gaps: dict[str, float] = {}
    program = replace(program, flags=program.flags | FLAGS.get(program.name, {}))
    try:
        with served(program, Path(path), folder / f"{program.name}.log") as address:
            names = {"experiment_name": "servers", "trial_name": program.name, "fileroot": str(folder)}
            engine = program.client(InferenceEngineConfig(server_addrs=[address], backend=program.name, **names))
            engine.initialize(None, None)
            try:
                for version, way in enumerate(("broadcast", "disk", ""), start=1):
                    batch = engine.rollout_batch([ROW], workflow)
                    gaps[f"version {version - 1}"] = _gap(actor, batch)
                    gaps[f"continued at version {version - 1}"] = _continued(engine, actor, batch)
                    if way:
                        actor.compute_advantages(batch)
                        assert actor.ppo_update(batch)["optim/grad_norm"] > 0
                        engine.config.weight_update = way
                        assert _gap(actor, batch) > 100 * BOUND, "an update must be seen in logprobs"
                        publish_weights(actor, engine, version=version)
            finally:
                engine.destroy()
    finally:
        workflow.close()
        actor.destroy()
    return {"failed": sum(not gap < BOUND for gap in gaps.values()), "gaps": gaps}


def _gap(actor: FSDPPPOActor, batch: TensorDict) -> float:
    mask = batch["loss_mask"].bool()
    return float((batch["logprobs"] - actor.compute_logprobs(batch))[mask].abs().max())


def _continued(engine: RemoteInferenceEngine, actor: FSDPPPOActor, batch: TensorDict) -> float:
    """Let the server continue a completion in its middle, as after an interruption; return the gap."""
    row = batch[:1].clone()
    start = int(row["loss_mask"][0].nonzero()[0])
    ids: list[int] = row["input_ids"][0, :start].tolist()
    # SGLang refuses a prompt with `<|video_pad|>`, which an untrained model samples by chance, too.
    added = set(load_hf_tokenizer(actor.config.path).get_added_vocab().values())
    texts = [
        itertools.takewhile(lambda token: token not in added, one[start : start + 5])
        for one in batch["input_ids"].tolist()
    ]
    sampled: Sequence[int] = max(map(list, texts), key=len)
    request = ModelRequest(
        ids,
        GenerationHyperparameters(max_new_tokens=12),
        image_data=[as_base64(one) for one in IMAGES],
        image_token_id=image_token_id(load_hf_tokenizer(actor.config.path)),
    )
    completions = engine._completions
    (server,) = completions.servers.servers

    async def complete() -> Segment:
        connection = completions.connection(server.address, deadline_in(150.0))
        return await completions.backend.complete(connection, request, list(sampled), 7, ignore_eos=True)

    try:
        segment = engine.run(complete())
    except ServerError:  # once an idle SGLang never answered, why is not known; a client asks again, too
        segment = engine.run(complete())
    whole = torch.tensor([[*ids, *sampled, *segment.tokens]])
    shown = {key: row[key] for key in ("pixel_values", "image_grid_thw")}
    tokens = {"input_ids": whole, "attention_mask": torch.ones_like(whole, dtype=torch.bool)}
    expected = actor.compute_logprobs(TensorDict(tokens | shown, batch_size=[1]))[0, -len(segment.tokens) :]
    return float((torch.tensor(segment.logprobs) - expected).abs().max())

"""SGLang and vLLM on the trainer's GPU: the memory that a server gives back is there for the trainer, and back in time.

The interpreters are those of `make test-sglang` and `make test-vllm`: AREALITE_SGLANG_PYTHON, AREALITE_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from servers.programs import program, served
from testing_quickstart import make_tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, OptimizerConfig, PPOActorConfig
from arealite.api.io_struct import FinetuneSpec, ModelRequest
from arealite.api.servers import KINDS
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.weights.publish import publish_weights

SHARE = 0.4
"""Of the GPU's memory, which the server takes while it is awake."""


def write_model(folder: Path) -> Path:
    """Write a model whose heads have a size that the kernels of servers know."""
    make_tiny_model(folder, seed=1)  # its tokenizer
    config = Qwen3Config.from_pretrained(folder)
    config.update({"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_server_gives_its_memory_back_and_samples_from_the_next_weights(name: Any, tmp_path: Path) -> None:
    if not (python := os.environ.get(f"AREALITE_{name.upper()}_PYTHON")):
        pytest.skip(f"needs {name}: name its interpreter in AREALITE_{name.upper()}_PYTHON")
    kind, model = KINDS[name], write_model(tmp_path / "model")
    flags = {"dtype": "bfloat16", kind.context_flag: 512, kind.memory_flag: SHARE, kind.sleep_flag: True}
    server = replace(program(name, python), flags=flags, env=dict(kind.sleep_env))
    actor = FSDPPPOActor(PPOActorConfig(path=str(model), dtype="bfloat16", optimizer=OptimizerConfig()))
    names = {"experiment_name": "e", "trial_name": "t", "fileroot": str(tmp_path), "tokenizer_path": str(model)}
    with served(server, model, tmp_path / "server.log") as address:
        engine = RemoteInferenceEngine(
            InferenceEngineConfig(
                backend=name, server_addrs=[address], servers_sleep=True, weight_update="disk", **names
            )
        )
        actor.initialize(None, FinetuneSpec(1, 10, 1))
        try:
            engine.initialize(None, None)
            publish_weights(actor, engine, version=0)
            awake, total = torch.cuda.mem_get_info()
            for version in (1, 2):
                engine.sleep()
                asleep, _ = torch.cuda.mem_get_info()
                assert asleep - awake > 0.8 * SHARE * total, f"{(asleep - awake) / 2**30:.1f} GiB were given back"
                taken = torch.empty(asleep - 2**30, dtype=torch.uint8, device="cuda").fill_(version)
                del taken  # the allocator keeps it; the publication has to return it
                with torch.no_grad():
                    for parameter in actor.model.parameters():
                        parameter.mul_(1.01)
                publish_weights(actor, engine, version=version)
                assert abs(torch.cuda.mem_get_info()[0] - awake) < 2**30
                request = ModelRequest([5, 6, 7], GenerationHyperparameters(max_new_tokens=32))
                response = asyncio.run(engine.agenerate(request))
                assert set(response.output_versions) == {version}
                assert engine.metrics()["policy/canary_gap"] < 0.1
        finally:
            engine.destroy()
            actor.destroy()

"""The bytes of an optimizer step on two ranks, against the plan."""

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import testing_forks
import torch
from testing_memory import PeakBytes
from training_cases import token_batch, train_config
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import FSDPEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.planner.memory import model_shape, shape_of_rank, training_state, training_step

pytestmark = pytest.mark.xdist_group("two_ranks")
LENGTH = 128
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def peaks_of_rank(pipe: Connection, path: str, layout: str) -> None:
    """Send the peak of a step of two micro-batches, without parameters and moments, for both ways to reduce."""
    torch.set_num_threads(1)
    peaks = {}
    for reduces_once in (False, True):
        sharding = FSDPEngineConfig(reduce_once=reduces_once)
        options = {"dtype": "bfloat16", "gradient_checkpointing": True, "parallel": layout}
        config = train_config(path, max_tokens=LENGTH, fsdp=sharding, **options)
        engine = FSDPEngine(config)
        engine.initialize(None, FinetuneSpec(1, 100, 10))
        batch = token_batch([LENGTH] * 2)
        engine.train_batch(batch[:1], sft_loss_fn, count_loss_tokens)  # makes the moments
        with PeakBytes() as bytes_of_step:
            engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
        peaks[reduces_once] = bytes_of_step.peak
        engine.destroy()
    if os.environ["RANK"] == "0":
        pipe.send(peaks)


@pytest.mark.parametrize("layout", ["d2", "t2", "c2", "d2e2", "p2"])
def test_a_step_needs_what_the_plan_says(tmp_path: Path, layout: str) -> None:
    sizes = ParallelSizes.from_str(layout)
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(**SHAPE, **of_experts) if sizes.expert > 1 else Qwen3Config(**SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with testing_forks.two_ranks(peaks_of_rank, str(tmp_path), layout) as ranks:
        peaks = ranks[0].receive()
        assert [rank.end() for rank in ranks] == [0, 0]
    shape = shape_of_rank(model_shape(build_meta_model(str(tmp_path), PACKED_SDPA)), sizes)
    num_shards, tokens = sizes.data * sizes.context, LENGTH // sizes.context
    step = training_step(shape, tokens=tokens, ranks=num_shards, compute_bytes=2, accumulates=False, recomputes=True)
    state = training_state(shape, ranks=num_shards, has_optimizer=True)
    planned, held = state["gradients"] + sum(step.values()), state["parameters"] + state["AdamW moments"]
    assert 0.95 < planned / peaks[False] < 1.1, planned / peaks[False]
    assert 0.95 < (planned + held) / (peaks[False] + held) < 1.05, "of all that a rank has"
    if layout == "d2":
        unsharded = shape.num_parameters * 4 / 2  # what a rank keeps of the gradient beyond its own shard
        assert 0.75 < (peaks[True] - peaks[False]) / unsharded < 1.1

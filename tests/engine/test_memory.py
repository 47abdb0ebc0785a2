"""The bytes of an optimizer step on two ranks, against the plan."""

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import testing_forks
import torch
from testing_memory import PeakBytes
from training_cases import token_batch, train_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import FSDPEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.planner.memory import model_shape, training_state, training_step

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


def peaks_of_rank(pipe: Connection, path: str) -> None:
    """Send the peak of a step of two micro-batches, without parameters and moments, for both ways to reduce."""
    torch.set_num_threads(1)
    peaks = {}
    for reduces_once in (False, True):
        sharding = FSDPEngineConfig(reduce_once=reduces_once)
        config = train_config(path, max_tokens=LENGTH, dtype="bfloat16", gradient_checkpointing=True, fsdp=sharding)
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


def test_a_step_needs_what_the_plan_says(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(tmp_path)
    with testing_forks.two_ranks(peaks_of_rank, str(tmp_path)) as ranks:
        peaks = ranks[0].receive()
        assert [rank.end() for rank in ranks] == [0, 0]
    shape = model_shape(build_meta_model(str(tmp_path), PACKED_SDPA))
    step = training_step(shape, tokens=LENGTH, ranks=2, compute_bytes=2, accumulates=False, recomputes=True)
    planned = training_state(shape, ranks=2, has_optimizer=True)["gradients"] + sum(step.values())
    assert 0.95 < planned / peaks[False] < 1.1
    unsharded = shape.num_parameters * 4 / 2  # what a rank keeps of the gradient beyond its own shard
    assert 0.75 < (peaks[True] - peaks[False]) / unsharded < 1.1

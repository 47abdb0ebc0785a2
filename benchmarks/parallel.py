"""What dividing a model over ranks costs: tokens/s of training, the share of time in collectives, and padding.

    python benchmarks/parallel.py [--rounds 3] [--json] [--out FILE]

Every round trains each layout in turn on the same rows; `ratio` is its tokens/s over those of data parallelism in the
same round, and numbers are medians over the rounds. `collective_share` is the share of a step that rank 0 spends in
collectives and in waiting for others there. `padding_share` is the share of positions that are padding, which stages of
a pipeline need to be of equal length. On CPUs ranks share cores and talk over the loopback: compare with the same
machine's past alone.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from circumstances import options, report
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.utils.network import hold_port, port_of

LAYOUTS = {"dense": ("d4", "d2t2", "t4", "d2c2", "c4", "d2p2", "p4"), "experts": ("d4", "d4e4", "d2t2e2", "d2c2e2")}
NUM_ROWS, LONGEST, MICRO_BATCH, STEPS = 32, 512, 1024, 3


def write_model(folder: Path, kind: str) -> None:
    """Save a model of about 2 million parameters."""
    common: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    common |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    if kind == "dense":
        config: Any = LlamaConfig(**common, intermediate_size=384)
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
        config = Qwen3MoeConfig(**common, **experts, intermediate_size=384)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def rows_of(sizes: ParallelSizes, rank: int) -> TensorDict:
    """Return this rank's rows: a fixed batch of lognormal lengths, dealt to the replicas."""
    draw = random.Random(1)
    lengths = torch.tensor([min(LONGEST, max(8, round(draw.lognormvariate(4.5, 0.8)))) for _ in range(NUM_ROWS)])
    mask = torch.arange(LONGEST) < lengths[:, None]
    ids = torch.randint(1, 4096, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    columns = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask & (torch.arange(LONGEST) > 0)}
    return TensorDict(columns, batch_size=[NUM_ROWS])[sizes.data_rank(rank) :: sizes.data]


def train(rank: int, path: str, layout: str, port: int, found: Any) -> None:
    """Train as one rank; rank 0 puts what it measures into the queue."""
    sizes = ParallelSizes.from_str(layout)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(sizes.world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    spec, optimizer = MicroBatchSpec(max_tokens_per_mb=MICRO_BATCH), OptimizerConfig(lr=1e-5)
    engine = FSDPEngine(
        TrainEngineConfig(path=path, parallel=layout, dtype="float32", optimizer=optimizer, mb_spec=spec)
    )
    engine.initialize(None, None)
    columns = rows_of(sizes, rank)
    engine.train_batch(columns, sft_loss_fn, count_loss_tokens)
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.train_batch(columns, sft_loss_fn, count_loss_tokens)
    step_s = (time.perf_counter() - began) / STEPS
    padding = engine.costs.take()["perf/padding_share"]
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        engine.train_batch(columns, sft_loss_fn, count_loss_tokens)
    profiled_s = time.perf_counter() - began
    waits_us = sum(
        event.cpu_time_total for event in profiled.key_averages() if event.key.startswith(("gloo:", "nccl:"))
    )
    if rank == 0:
        found.put({"step_s": step_s, "collective_share": waits_us / 1e6 / profiled_s, "padding_share": padding})
    engine.destroy()


def measure(folder: Path, layout: str) -> dict[str, float]:
    """Train one layout in processes of its own."""
    found = multiprocessing.get_context("forkserver").Queue()
    with hold_port() as held:
        arguments = str(folder), layout, port_of(held), found
        num_ranks = ParallelSizes.from_str(layout).world_size
        multiprocessing.start_processes(train, arguments, num_ranks, start_method="forkserver")
    result: dict[str, float] = found.get(timeout=60)
    return result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload([FSDPEngine.__module__])
    num_tokens = int(rows_of(ParallelSizes(), 0)["attention_mask"].sum())
    with tempfile.TemporaryDirectory() as folder:
        for kind, layouts in LAYOUTS.items():
            write_model(Path(folder, kind), kind)
            rounds = [{layout: measure(Path(folder, kind), layout) for layout in layouts} for _ in range(args.rounds)]
            for layout in layouts:
                own = [one[layout] for one in rounds]
                median = {key: statistics.median(one[key] for one in own) for key in own[0]}
                ratio = statistics.median(one[layouts[0]]["step_s"] / one[layout]["step_s"] for one in rounds)
                result = {
                    "model": kind,
                    "layout": layout,
                    "tokens_per_s": num_tokens / median["step_s"],
                    "ratio": ratio,
                }
                report(args, result | median | {"rounds": args.rounds})


if __name__ == "__main__":
    main()

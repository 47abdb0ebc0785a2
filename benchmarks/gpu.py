"""What one device does: an update's tokens per second and MFU, and decoding against its memory bandwidth.

    python benchmarks/gpu.py train|decode [--size 0.6b] [--tokens 16384] [--json] [--out FILE]

Models have random weights in the shape of `--size`, computed in bfloat16. `benchmarks/gpu.sh` runs all that a GPU is
wanted for; on a CPU everything runs too, with `--size tiny`, and only the device differs.

- train: updates of `--tokens` tokens, packed from rows of an eighth of them, after two that are not measured. A model
  that would not fit loses layers, as many as the memory plan says: tokens per second then are those of a smaller model,
  MFU is comparable. `planned_gib` is that plan.
- decode: `--slots` sequences at once, `--new-tokens` each, in the embedded engine. A step must read all weights and the
  cache of all sequences: `bound_tok_per_s` is what the bandwidth allows, which a copy of memory measures first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from circumstances import options, report
from model_configs import SIZES, VOCABULARY, write_config
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.generation.request import GenerationRequest, SamplingParams
from arealite.planner.memory import kv_bytes_per_token, model_shape, training_state, training_step

GIB = 2**30
ROWS = 8
FREE = 0.15  # of a device's memory that the plan must leave
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def main() -> None:
    """Measure one part and print one line."""
    parser = options(__doc__)
    parser.add_argument("part", choices=("train", "decode"))
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = (train if args.part == "train" else decode)(args, Path(folder))
    device = torch.cuda.get_device_name() if HAS_GPU else "cpu"
    report(args, {"part": args.part, "size": args.size, "device": device, **found})


def train(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure updates of a model that fits."""
    layers, planned = fitting(args, folder)
    config = TrainEngineConfig(
        path=str(folder), optimizer=OptimizerConfig(), init_from_scratch=True, torch_compile=args.compile
    )
    engine = FSDPEngine(config)
    engine.initialize(None, FinetuneSpec(1, 100, 10))
    engine.train()
    batch, seconds = rows(args.tokens), []
    for step in range(2 + args.steps):
        if HAS_GPU and step == 2:
            torch.cuda.reset_peak_memory_stats()
        seconds.append(timed(lambda: engine.train_batch(batch, sft_loss_fn, count_loss_tokens)))
    costs = engine.costs
    flops = costs.flops([args.tokens // ROWS] * ROWS) / statistics.median(seconds[2:])
    peak = torch.cuda.max_memory_allocated() if HAS_GPU else 0
    engine.destroy()
    return {
        "tokens": args.tokens,
        "layers": layers,
        "is_compiled": args.compile,
        "attention": engine._attention,
        "tok_per_s": round(args.tokens / statistics.median(seconds[2:]), 1),
        "tflop_per_s": round(flops / 1e12, 3),
        "mfu": round(flops / costs.peak, 4) if costs.peak else None,
        "first_step_s": round(seconds[0], 2),
        "planned_gib": round(planned / GIB, 3),
        "peak_gib": round(peak / GIB, 3),
    }


def fitting(args: argparse.Namespace, folder: Path) -> tuple[int, int]:
    """Write the config of the largest model of this size that fits, and return its layers and planned bytes."""
    memory = torch.cuda.get_device_properties(0).total_memory if HAS_GPU else psutil.virtual_memory().available
    for layers in range(SIZES[args.size]["num_hidden_layers"], 0, -1):
        write_config(folder, args.size, num_hidden_layers=layers)
        shape = model_shape(build_meta_model(str(folder), PACKED_SDPA))
        state = training_state(shape, ranks=1, has_optimizer=True)
        sizes = {"tokens": args.tokens, "ranks": 1, "compute_bytes": 2, "recomputes": True}
        planned = sum(state.values()) + sum(training_step(shape, accumulates=False, **sizes).values())
        if planned < (1 - FREE) * memory:
            return layers, planned
    raise SystemExit(f"one layer of {args.size} must fit into {memory / GIB:.1f} GiB: it needs {planned / GIB:.1f} GiB")


def rows(num_tokens: int) -> TensorDict:
    """Return rows of random tokens, an eighth of them each."""
    ids = torch.randint(1, 500, (ROWS, num_tokens // ROWS), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.ones_like(ids)
    loss_mask[:, 0] = 0
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "loss_mask": loss_mask}
    return TensorDict(batch, batch_size=[ROWS])


def decode(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure sampling by the embedded engine, after a round that captures what it replays."""
    write_config(folder, args.size)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    prompt, context = 64, 64 + args.new_tokens
    runner = ModelRunner(model, slots=args.slots, context=context)
    engine = GenerationEngine(runner)
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    ids = torch.randint(1, 500, (args.slots, prompt), generator=torch.Generator().manual_seed(0)).tolist()

    def sample() -> None:
        requests = [GenerationRequest(str(one), tuple(row), params) for one, row in enumerate(ids)]
        for future in [engine.submit(request) for request in requests]:
            assert len(future.result(timeout=600).output_ids) == args.new_tokens

    try:
        sample()
        seconds = min(timed(sample) for _ in range(2))
    finally:
        engine.close()
    shape, tokens = model_shape(model), args.slots * args.new_tokens
    looked_up = 0 if shape.is_tied else VOCABULARY * shape.hidden  # an embedding reads one row a token
    cache = args.slots * kv_bytes_per_token(shape, value_bytes=2) * (prompt + args.new_tokens / 2)
    step_bytes = 2 * (shape.num_parameters - looked_up) + cache
    speed = bandwidth()
    bound = args.slots * speed / step_bytes
    return {
        "slots": args.slots,
        "new_tokens": args.new_tokens,
        "tok_per_s": round(tokens / seconds, 1),
        "bandwidth_gb_per_s": round(speed / 1e9, 1),
        "bound_tok_per_s": round(bound, 1),
        "of_bound": round(tokens / seconds / bound, 3),
    }


def bandwidth() -> float:
    """Return the bytes per second that a copy reads and writes."""
    size = 2**30 if HAS_GPU else 2**27
    source, target = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * size / min(timed(lambda: target.copy_(source)) for _ in range(5))


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until the device has done this."""
    if HAS_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if HAS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""What one device does: updates and decoding beside plain transformers, and GRPO with the server in the trainer.

    python benchmarks/gpu.py train|decode|grpo|paper [--size 0.6b] [--tokens 16384] [--json] [--out FILE]

Models have random weights in the shape of `--size`, computed in bfloat16. `benchmarks/gpu.sh` runs all that a GPU is
wanted for; on a CPU everything runs too, with `--size tiny`, and only the device differs.

- train: updates of `--tokens` tokens, packed from rows of an eighth of them, after two that are not measured
  (`warm_up_s`, with compilation). A model that would not fit loses layers, as many as the memory plan says: tokens per
  second then are those of a smaller model, MFU is comparable. `planned_gib` is that plan. With `--peer` a second line:
  the same rows, in turn, through transformers alone, with what a step costs without us.
- decode: `--slots` sequences at once, `--new-tokens` each, in the embedded engine, in turn with `generate`; prefill is
  timed apart. A step must read all weights and the cache of all sequences: `bound_tok_per_s` is what the bandwidth
  allows, which a copy of memory measures first.
- grpo: `--steps` steps of the GRPO example by the launcher, `lite.d1|d1`: a process that samples and trains.
- paper: needs no GPU: where the time of a step of `train` would go on `--gpu`, at the peaks of its profile, from the
  FLOPs of `UpdateCosts` and the shapes and activations of the planner. Matrix products and other kernels take turns;
  what layers move is each activation once written and once read in every pass, as compiled layers would.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from circumstances import options, report
from model_configs import SIZES, VOCABULARY, write_config, write_tiny
from tensordict import TensorDict
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine import hf_model
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.metrics import UpdateCosts
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.generation.request import GenerationRequest, SamplingParams
from arealite.planner.cost import load_gpu
from arealite.planner.memory import (
    FLOAT32,
    kv_bytes_per_token,
    layer_activations,
    model_shape,
    training_state,
    training_step,
)

GIB = 2**30
ROWS, PROMPT = 8, 64
FREE = 0.15  # of a device's memory that the plan must leave
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OF_TORCH = [getattr(SDPBackend, f"{name}_ATTENTION") for name in ("CUDNN", "FLASH", "EFFICIENT")] + [SDPBackend.MATH]
"""The order in which torch chooses attention on Hopper; we leave cuDNN out, transformers alone has it."""
EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    """Measure one part and print its lines."""
    parser = options(__doc__)
    parser.add_argument("part", choices=("train", "decode", "grpo", "paper"))
    parser.add_argument("--size", choices=SIZES, default="0.6b")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--keep", action="store_true", help="keep activations, where the default computes them again")
    parser.add_argument("--bf16-moments", action="store_true", help="12 bytes per parameter instead of 16")
    parser.add_argument("--peer", action="store_true", help="compare with transformers alone")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel of a decoding step from Python")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--gpu", default="h100", help="profile of `arealite simulate` that paper computes for")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"train": train, "decode": decode, "grpo": grpo, "paper": paper}[args.part](args, Path(folder))


def note(args: argparse.Namespace, part: str, found: dict[str, Any]) -> None:
    """Print and keep a result."""
    device = torch.cuda.get_device_name() if HAS_GPU else "cpu"
    report(args, {"part": part, "size": args.size, "device": device, **found})


def train(args: argparse.Namespace, folder: Path) -> None:
    """Measure updates of a model that fits, then the same in turn with transformers."""
    layers, planned = fitting(args, folder)
    batch, began = rows(args.tokens), allocated()
    engine = engine_of(args, folder)
    ours = Side(lambda: engine.train_batch(batch, sft_loss_fn, count_loss_tokens), began)
    for _ in range(args.steps):
        ours.run()
    lengths, costs = [args.tokens // ROWS] * ROWS, engine.costs
    common = {
        "tokens": args.tokens,
        "layers": layers,
        "is_compiled": args.compile,
        "recomputes": not args.keep,
        "moments": "bfloat16" if args.bf16_moments else "float32",
        "attention": engine._attention,
    }

    def rates(side: Side, name: str = "") -> dict[str, Any]:
        seconds = statistics.median(side.seconds)
        flops = costs.flops(lengths) / seconds
        return {
            f"{name}tok_per_s": round(args.tokens / seconds, 1),
            f"{name}tflop_per_s": round(flops / 1e12, 3),
            f"{name}mfu": round(flops / costs.peak, 4) if costs.peak else None,
            f"{name}peak_gib": round(side.peak / GIB, 3),
        }

    found = rates(ours) | {"planned_gib": round(planned / GIB, 3), "warm_up_s": ours.warm_up_s}
    note(args, "train", common | found)
    if args.peer:
        peer, ours.seconds = Side(transformers_step(args, folder, batch), allocated()), []
        for _ in range(args.steps):
            ours.run()
            peer.run()
        what = "transformers, sdpa, bfloat16 autocast of float32 weights, fused AdamW, not compiled, equal lengths"
        found = rates(ours) | rates(peer, "peer_") | {"peer_warm_up_s": peer.warm_up_s, "peer": what}
        ratio = statistics.median(b / a for a, b in zip(ours.seconds, peer.seconds, strict=True))
        note(args, "train beside transformers", {"ratio": round(ratio, 3), **common, **found})
    engine.destroy()


class Side:
    """One of two that take the same step in turn: its seconds, and the memory that it has at most."""

    def __init__(self, step: Callable[[], Any], began: int) -> None:
        """Warm up; `began` is what was allocated before any of it was there."""
        self.step, self.seconds, self.peak = step, list[float](), 0
        self.warm_up_s = [round(timed(step), 2) for _ in range(2)]
        self.held = allocated() - began

    def run(self) -> None:
        """Take a step."""
        before = allocated()
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
        self.seconds.append(timed(self.step))
        self.peak = max(self.peak, self.held + torch.cuda.max_memory_allocated() - before if HAS_GPU else 0)


def allocated() -> int:
    """Return the bytes of all tensors on the GPU."""
    return torch.cuda.memory_allocated() if HAS_GPU else 0


def engine_of(args: argparse.Namespace, folder: Path) -> FSDPEngine:
    """Return the trainer of one rank, whose random weights are drawn on the device: a CPU takes a minute for 8B."""
    config = TrainEngineConfig(
        path=str(folder),
        optimizer=OptimizerConfig(type="adam_bf16" if args.bf16_moments else "adam"),
        init_from_scratch=True,
        torch_compile=args.compile,
        gradient_checkpointing=not args.keep,
    )
    load = hf_model.load_whole_model

    def load_on_device(*words: Any, **options: Any) -> Any:
        with DEVICE:
            return load(*words, **options)

    hf_model.load_whole_model = load_on_device
    engine = FSDPEngine(config)
    engine.initialize(None, FinetuneSpec(1, 100, 10))
    engine.train()
    return engine


def transformers_step(args: argparse.Namespace, folder: Path, batch: TensorDict) -> Callable[[], None]:
    """Return a step as a script with transformers and torch alone would take it."""
    model = random_model(folder, torch.float32).train()
    if not args.keep:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=OptimizerConfig().lr, fused=True)
    ids = batch["input_ids"].to(DEVICE)

    @sdpa_kernel(OF_TORCH, set_priority=True)
    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def random_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return a model of a config with random weights on the device."""
    with DEVICE:
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="sdpa"
        )


def fitting(args: argparse.Namespace, folder: Path) -> tuple[int, int]:
    """Write the config of the largest model of this size that fits, and return its layers and planned bytes."""
    memory = torch.cuda.get_device_properties(0).total_memory if HAS_GPU else psutil.virtual_memory().available
    sizes = {"tokens": args.tokens, "ranks": 1, "compute_bytes": 2, "recomputes": not args.keep}
    for layers in range(SIZES[args.size]["num_hidden_layers"], 0, -1):
        write_config(folder, args.size, num_hidden_layers=layers)
        shape = model_shape(hf_model.build_meta_model(str(folder), PACKED_SDPA))
        state = training_state(shape, ranks=1, has_optimizer=True, moment_bytes=2 if args.bf16_moments else 4)
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


def decode(args: argparse.Namespace, folder: Path) -> None:
    """Measure sampling by the embedded engine and by `generate`, in turn, on prompts that neither has seen."""
    write_config(folder, args.size)
    model, plain = (random_model(folder, torch.bfloat16).eval() for _ in range(2))
    engine = GenerationEngine(runner_of(args, model))
    draw = torch.Generator().manual_seed(0)
    found = {name: {length: list[float]() for length in (1, args.new_tokens)} for name in ("ours", "peer")}

    def sample(ids: torch.Tensor, num_tokens: int) -> None:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        requests = [GenerationRequest(str(one), tuple(row), params) for one, row in enumerate(ids.tolist())]
        for future in [engine.submit(request) for request in requests]:
            assert len(future.result(timeout=600).output_ids) == num_tokens

    @sdpa_kernel(OF_TORCH, set_priority=True)
    def generate(ids: torch.Tensor, num_tokens: int) -> None:
        mask = torch.ones_like(ids, device=DEVICE)
        options = {"max_new_tokens": num_tokens, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        assert plain.generate(ids.to(DEVICE), attention_mask=mask, **options).shape[1] == PROMPT + num_tokens

    try:
        for is_measured in (False, True, True):
            for name, work in (("ours", sample), ("peer", generate)) if args.peer else (("ours", sample),):
                for length, seconds in found[name].items():
                    ids = torch.randint(1, 500, (args.slots, PROMPT), generator=draw)
                    took = timed(lambda work=work, ids=ids, length=length: work(ids, length))
                    if is_measured:
                        seconds.append(took)
    finally:
        engine.close()
    shape, speed = model_shape(model), bandwidth()
    looked_up = 0 if shape.is_tied else VOCABULARY * shape.hidden  # an embedding reads one row a token
    cache = args.slots * kv_bytes_per_token(shape, value_bytes=2) * (PROMPT + args.new_tokens / 2)
    bound = args.slots * speed / (2 * (shape.num_parameters - looked_up) + cache)

    def rates(name: str, prefix: str = "") -> dict[str, float]:
        prefill_s, whole_s = (min(seconds) for seconds in found[name].values())
        decode_s = max(whole_s - prefill_s, 1e-9)
        return {
            f"{prefix}tok_per_s": round(args.slots * (args.new_tokens - 1) / decode_s, 1),
            f"{prefix}prefill_tok_per_s": round(args.slots * PROMPT / prefill_s, 1),
            f"{prefix}step_ms": round(1000 * decode_s / (args.new_tokens - 1), 3),
        }

    has_graphs = HAS_GPU and not args.no_graphs
    result = rates("ours") | {"slots": args.slots, "new_tokens": args.new_tokens, "graphs": has_graphs}
    result |= {"bandwidth_gb_per_s": round(speed / 1e9, 1), "bound_tok_per_s": round(bound, 1)}
    result["of_bound"] = round(result["tok_per_s"] / bound, 3)
    if args.peer:
        result |= rates("peer", "peer_") | {"peer": "generate of transformers, sdpa, bfloat16, dynamic cache"}
        result["ratio"] = round(result["tok_per_s"] / result["peer_tok_per_s"], 3)
    note(args, "decode", result)


def runner_of(args: argparse.Namespace, model: Any) -> ModelRunner:
    """Return what the engine runs."""
    runner = ModelRunner(model, slots=args.slots, context=PROMPT + args.new_tokens)
    if args.no_graphs:
        runner._graphs = None
    return runner


REWARD = """
import random

def reward(completions, **others):  # of random tokens, most of which are no text; equal rewards would train nothing
    return random.random()
"""
SHOWN = ("step_s", "rollout_s", "update_s", "weights_s")


def grpo(args: argparse.Namespace, folder: Path) -> None:
    """Train by the launcher, server and trainer in one process, and report its own metrics after the first step."""
    write_tiny(str(folder / "model"))  # for its tokenizer
    if args.size != "tiny":
        write_config(folder, args.size)
        random_model(folder, torch.bfloat16).save_pretrained(folder / "model")
        torch.cuda.empty_cache()
    (folder / "reward.py").write_text(REWARD)
    script, config = EXAMPLES / "arealite" / "gsm8k_grpo.py", EXAMPLES / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
    words = [f"actor.path={folder / 'model'}", f"cluster.fileroot={folder / 'runs'}", "trial_name=t"]
    words += ["allocation_mode=lite.d1|d1", f"cluster.n_gpus_per_node={int(HAS_GPU)}", "experiment_name=gpu"]
    words += [f"total_train_steps={args.steps}", f"gconfig.max_new_tokens={args.new_tokens}", "gconfig.n_samples=8"]
    words += [f"train_dataset.batch_size={args.slots // 8}", "valid_dataset.max_rows=2", "recover.mode=disabled"]
    words += [f"train_dataset.path={EXAMPLES / 'quickstart' / 'word_problems.py'}:rows?train=400&test=10"]
    words += [f"reward={folder / 'reward.py'}:reward", "launcher.preflight=false", f"lite.slots={args.slots}"]
    words += ["actor.optimizer.lr=1e-6", f"rollout.max_concurrent_rollouts={args.slots // 8}"]
    if HAS_GPU:
        words += ["actor.dtype=bfloat16", "lite.dtype=bfloat16", "actor.gradient_checkpointing=true"]
    command = [sys.executable, "-m", "arealite.launcher.local", str(script), "--config", str(config), *words]
    began = time.perf_counter()
    run = subprocess.run(command, check=False)
    lines = (folder / "runs/gpu/t/metrics.jsonl").read_text().splitlines() if run.returncode == 0 else []
    if not lines:
        for log in sorted((folder / "runs").glob("gpu/t/logs/*.log")):
            print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-40:], sep="\n", flush=True)
        raise SystemExit(f"the run must end with status 0: got {run.returncode}, see above")
    steps = [json.loads(line) for line in lines][1 : args.steps] or [json.loads(lines[0])]

    def median(key: str) -> float:
        return round(statistics.median(step[key] for step in steps), 4)

    result = {name: median(f"time/{name}") for name in SHOWN} | {"new_tokens": args.new_tokens, "steps": len(steps)}
    result |= {name: median(f"perf/{name}") for name in ("tokens_per_s", "generated_tokens_per_s", "memory_gib_max")}
    result |= {name: max(step[f"policy/{name}"] for step in steps) for name in ("mismatch_kl", "canary_gap")}
    note(args, "grpo", result | {"run_s": round(time.perf_counter() - began, 1)})


def paper(args: argparse.Namespace, folder: Path) -> None:
    """Compute where the time of a training step goes at a device's peaks."""
    write_config(folder, args.size)
    model = hf_model.build_meta_model(str(folder), PACKED_SDPA)
    shape, gpu, tokens = model_shape(model), load_gpu(args.gpu), args.tokens
    costs = UpdateCosts(model, torch.device("cpu"), torch.bfloat16)
    counted = costs.flops([tokens // ROWS] * ROWS)
    attention = (counted - costs.flops_per_token * tokens) / 3  # of a forward pass, as if nothing were masked
    passes, moment = 3 + (not args.keep), 2 if args.bf16_moments else FLOAT32
    num, in_layers = shape.num_parameters, shape.num_parameters - shape.outer_parameters
    flops = {
        "layers": 2 * passes * in_layers * tokens,
        "attention": attention / 2 * (passes - 2 + 2.5),  # FlashAttention computes scores again in the backward pass
        "output layer": 2 * 4 * shape.vocab * shape.hidden * tokens,  # logits twice, and two gradients
    }
    rounded = 0 if moment == FLOAT32 else 2 * 4 * FLOAT32  # moments as float32, written and read before and after
    activations = tokens * shape.num_layers * layer_activations(shape, compute_bytes=2)
    moved = {
        "AdamW and clipping": num * (6 * FLOAT32 + 4 * moment + rounded),  # weights, gradients three times, moments
        "gathered weights": 2 * num * (FLOAT32 + 3 * 2),  # cast and copied, in each direction
        "gradients": num * (2 + 3 * FLOAT32),
        "logits": tokens * shape.vocab * (20 + 42),  # forward, and again with their gradient, in bfloat16 and float32
        "activations": activations * 2 * passes,
    }
    milliseconds = {name: 1000 * one / gpu["flops"] for name, one in flops.items()}
    milliseconds |= {name: 1000 * one / gpu["bandwidth"] for name, one in moved.items()}
    whole_s = sum(milliseconds.values()) / 1000
    slower_s = whole_s + sum(flops.values()) / gpu["flops"] / 3  # products at three quarters of the peak
    state = training_state(shape, ranks=1, has_optimizer=True, moment_bytes=moment)
    sizes = {"tokens": tokens, "ranks": 1, "compute_bytes": 2, "recomputes": not args.keep}
    planned = sum(state.values()) + sum(training_step(shape, accumulates=False, **sizes).values())
    result = {"part": "paper", "size": args.size, "gpu": args.gpu, "tokens": tokens, "recomputes": not args.keep}
    result |= {"ms": {name: round(one, 1) for name, one in milliseconds.items()}, "step_ms": round(1000 * whole_s, 1)}
    result |= {"tflop": round(counted / 1e12, 1), "mfu": round(counted / gpu["flops"] / whole_s, 3)}
    result |= {"mfu_at_75": round(counted / gpu["flops"] / slower_s, 3), "planned_gib": round(planned / GIB, 1)}
    report(args, result)


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

"""Peak memory of a training step, term by term, against the plan of `arealite check`.

    python benchmarks/memory.py [--size small] [--layout d2] [--tokens 1024] [--case plain] [--json] [--out FILE]

Each case is one way to train, on fresh processes: a first step makes the moments, the second one is measured. State is
counted tensor by tensor. On top of parameters and moments a step has three phases: the forward pass and the output
layer, until the gradient of the hidden states is there; then the layers; what is in no layer is summed over ranks in
the last one, too. On a CPU all storages that operations make are counted, on a GPU the allocator says. Random weights;
only the model's config is on the disk. Models of 8B parameters and more want a GPU, or several.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from circumstances import options, report
from model_configs import SIZES, write_config

from arealite.algorithms.logprobs import LazyLogits, count_loss_tokens, packed_logprobs_entropy
from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import FSDPEngineConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.planner.memory import FLOAT32, model_shape, phases, shape_of_rank, training_state
from arealite.utils.network import hold_port, port_of

REPOSITORY = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 moments": {"optimizer": OptimizerConfig(type="adam_bf16")},
    "float32 output layer": {"cast_lm_head_to_fp32": True},
    "copies": {"fsdp": FSDPEngineConfig(dp_replicate=2)},
    "offloaded activations": {"activation_offloading": True},
}
"""Settings by case. Offloading frees nothing of a CPU, where it is left out."""


def main() -> None:
    """Measure all cases and print one line for each; with `--rank` be one of the processes."""
    parser = options(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--layout", default="d2", help="sizes of the ranks, e.g. d2t2; with e the model has experts")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch, of which a rank has two")
    parser.add_argument("--case", choices=CASES, action="append", help="measure only this one (may be repeated)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(measure(args, CASES[args.case[-1]])))
        return
    if not torch.cuda.is_available():
        del CASES["offloaded activations"]
    sizes = ParallelSizes.from_str(args.layout)
    for case in args.case or [case for case in CASES if case != "copies" or sizes.data % 2 == 0]:
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), args.size, has_experts=sizes.expert > 1)
            measured = run(args, case, folder)
            planned = plan(args, CASES[case], folder)
        terms = {
            name: {"planned": planned[name], "measured": size, "ratio": round(planned[name] / size, 3)}
            for name, size in measured.items()
        }
        result = {"case": case, "size": args.size, "layout": args.layout, "tokens": args.tokens, "terms": terms}
        report(args, result, described)


def described(result: dict[str, Any]) -> str:
    """Return a result as text."""
    sizes = {name: [term[side] / 2**20 for side in ("planned", "measured")] for name, term in result["terms"].items()}
    terms = "; ".join(f"{name} {planned:.0f} / {measured:.0f}" for name, (planned, measured) in sizes.items())
    return f"{result['case']}, MiB planned / measured: {terms}"


def run(args: argparse.Namespace, case: str, folder: str) -> dict[str, int]:
    """Let the ranks measure a case, and return what the one with most found."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--folder", folder, "--rank"]
    num_ranks = ParallelSizes.from_str(args.layout).world_size
    with hold_port() as holder:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(holder)), "WORLD_SIZE": str(num_ranks)}
        started = [
            subprocess.Popen(
                [*command, str(rank)],
                env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        found = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed, see above")
    ranks = [json.loads(text.splitlines()[-1]) for text in found]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def engine_config(args: argparse.Namespace, settings: dict[str, Any], folder: str) -> TrainEngineConfig:
    """Return the config of a case."""
    common = {"optimizer": OptimizerConfig(), "mb_spec": MicroBatchSpec(n_mbs=2), "init_from_scratch": True}
    return TrainEngineConfig(path=folder, parallel=args.layout, **common | settings)


def plan(args: argparse.Namespace, settings: dict[str, Any], folder: str) -> dict[str, int]:
    """Return the terms as `arealite check` plans them."""
    config, sizes = engine_config(args, settings, folder), ParallelSizes.from_str(args.layout)
    copies = config.fsdp.dp_replicate
    shape = shape_of_rank(model_shape(build_meta_model(folder, PACKED_SDPA)), sizes, copies=copies)
    ranks = sizes.data * sizes.context // copies
    assert config.optimizer is not None
    state = training_state(
        shape, ranks=ranks, has_optimizer=True, moment_bytes=2 if config.optimizer.type == "adam_bf16" else FLOAT32
    )
    found = phases(
        shape,
        tokens=args.tokens // sizes.context,
        ranks=ranks,
        compute_bytes=getattr(torch, config.dtype).itemsize,
        recomputes=True,
        outer_bytes=FLOAT32 if config.cast_lm_head_to_fp32 else None,
        offloads=config.activation_offloading,
        is_gloo=not torch.cuda.is_available(),
    )
    first, layer, last = (sum(parts.values()) + state["gradients"] for parts in found.values())
    step = {"forward and output layer": first, "layers and the rest": max(layer, last), "step": max(first, layer, last)}
    return state | step | {"all": step["step"] + state["parameters"] + state["AdamW moments"]}


def measure(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of each term on this rank."""
    engine = FSDPEngine(engine_config(args, settings, str(args.folder)))
    engine.initialize(None, FinetuneSpec(1, 100, 10))
    engine.train()
    gradients: list[int] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(local_bytes(one.grad) for one in engine.model.parameters()))
    )
    batch = tokens(args)
    step(engine, batch, lambda: 0)  # makes the moments
    marks: list[int] = []
    if engine.device.type == "cuda":
        before = torch.cuda.memory_allocated()

        def peak() -> int:
            found = torch.cuda.max_memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            return found

        peak()
        marks = step(engine, batch, peak)
    else:
        sys.path.insert(0, str(REPOSITORY / "tests"))
        from testing_memory import PeakBytes

        with PeakBytes() as counted:

            def peak() -> int:
                found, counted.peak = counted.peak, counted.live
                return found

            marks = step(engine, batch, peak)
    state = {
        "parameters": sum(map(local_bytes, engine.model.parameters())),
        "gradients": gradients[-1],
        "AdamW moments": sum(
            local_bytes(one[name]) for one in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        ),
    }
    engine.destroy()
    # Up to a mark is what its phase needed; the first micro-batch has no gradients of another one yet.
    found = {"forward and output layer": max(marks[0::2]), "layers and the rest": max(marks[1::2]), "step": max(marks)}
    return state | found | {"all": max(marks) + state["parameters"] + state["AdamW moments"]}


def step(engine: FSDPEngine, batch: Any, peak: Callable[[], int]) -> list[int]:
    """Take a step, and return the peaks until each gradient of hidden states, and until each end of a backward pass."""
    marks: list[int] = []

    def marked(logits: LazyLogits, micro_batch: Any) -> torch.Tensor:
        if marks:  # what follows the gradient of the last micro-batch
            marks.append(peak())
        logits.hidden_NH.register_hook(lambda gradient: marks.append(peak()))
        bounds = micro_batch["cu_seqlens"]
        logprobs, _ = packed_logprobs_entropy(logits, micro_batch["input_ids"], bounds)  # as a policy's loss does
        return -logprobs.sum() / count_loss_tokens(micro_batch)

    engine.train_batch(batch, marked, count_loss_tokens)
    return [*marks, peak()]


def tokens(args: argparse.Namespace) -> Any:
    """Return two rows of random tokens, each a micro-batch."""
    from tensordict import TensorDict

    sizes = ParallelSizes.from_str(args.layout)
    generator = torch.Generator().manual_seed(sizes.data_rank(args.rank))
    ids = torch.randint(1, 500, (2, args.tokens), generator=generator)
    ones = torch.ones_like(ids)
    loss_mask = ones.clone()
    loss_mask[:, 0] = 0
    return TensorDict({"input_ids": ids, "attention_mask": ones.bool(), "loss_mask": loss_mask}, batch_size=[2])


def local_bytes(tensor: Any) -> int:
    """Return the bytes of this rank's shard."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


if __name__ == "__main__":
    main()

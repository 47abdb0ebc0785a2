"""Memory and time of a policy's loss on top of the last hidden states: blocks of the vocabulary against whole logits.

    python benchmarks/logprob_memory.py [--tokens 8192] [--hidden 1536] [--dtype bfloat16] [--json] [--out FILE]

`whole` is what the trainer did before: logits `[N, V]`, from which chunks of 1,024 tokens are normalized, and their
gradient. Both sides compute logprobs, entropies and the gradients of hidden states and output layer, each in a fresh
process, in turn. Memory is the peak above hidden states and weight: of the process on a CPU, of the allocator on a GPU.
Seconds are CPU time on a CPU.
Gradients are compared in one process in float32, on `--compared` tokens; their distance is relative to the largest.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from circumstances import options, report

from arealite.algorithms.logprobs import LazyLogits, gather_logprobs_entropy

VOCABULARY = 151_936  # of Qwen2 and Qwen3
TEMPERATURE = 0.9
GIB = 2**30


def main() -> None:
    """Measure both sides in turn and print one line; with `--side` be one of them."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--compared", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("whole", "blocks"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(run(args)))
        return
    found: dict[str, list[dict[str, float]]] = {"whole": [], "blocks": []}
    for _ in range(args.rounds):
        for side, runs in found.items():
            command = [sys.executable, *sys.argv, "--side", side]
            runs.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    result: dict[str, Any] = {
        name: getattr(args, name) for name in ("tokens", "hidden", "vocabulary", "dtype", "rounds")
    }
    for side, runs in found.items():
        result[f"{side}_gib"] = round(statistics.median(run["bytes"] for run in runs) / GIB, 3)
        result[f"{side}_s"] = round(statistics.median(run["seconds"] for run in runs), 2)
    result["memory_ratio"] = round(result["whole_gib"] / result["blocks_gib"], 2)
    result["time_ratio"] = round(result["blocks_s"] / result["whole_s"], 2)
    result["gradient_distance"] = gradient_distance(args)
    report(args, result)


def run(args: argparse.Namespace) -> dict[str, float]:
    """Return peak bytes and seconds of one loss with its backward pass."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, labels = problem(args, args.tokens, getattr(torch, args.dtype), device)
    start = torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss
    clock = time.perf_counter if device == "cuda" else time.process_time
    began = clock()
    loss(args.side, hidden, weight, labels).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - began
    peak = (
        torch.cuda.max_memory_allocated()
        if device == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return {"bytes": peak - start, "seconds": seconds}


def problem(args: argparse.Namespace, num_tokens: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Return hidden states, the weight of an output layer whose logits are a few units wide, and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, args.hidden, dtype=dtype, device=device).requires_grad_()
    weight = torch.randn(args.vocabulary, args.hidden, dtype=dtype, device=device)
    weight.mul_(2.0 / args.hidden**0.5).requires_grad_()
    return hidden, weight, torch.randint(args.vocabulary, (num_tokens,), device=device)


def loss(side: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean negative logprob; entropies are computed for the metrics only, as in an update."""
    if side == "whole":
        return -WholeLogits.apply(F.linear(hidden, weight), labels)[0].mean()
    return -gather_logprobs_entropy(LazyLogits(hidden, weight), labels, TEMPERATURE)[0].mean()


def gradient_distance(args: argparse.Namespace) -> float:
    """Return how far apart the float32 gradients of both sides are, relative to the largest."""
    hidden, weight, labels = problem(args, args.compared, torch.float32, "cpu")
    of_sides = [
        torch.autograd.grad(loss(side, hidden, weight, labels), (hidden, weight)) for side in ("whole", "blocks")
    ]
    return max(((one - other).abs().max() / one.abs().max()).item() for one, other in zip(*of_sides))


class WholeLogits(torch.autograd.Function):
    """Logprobs and entropies from logits that are all in memory, as the trainer computed them at commit 769b940."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, normalizers = [], [], []
        for logits, labels in zip(logits_NV.split(1024), labels_N.split(1024)):
            scaled = logits.float() / TEMPERATURE
            normalizer = scaled.logsumexp(dim=-1)
            logprobs.append(scaled.gather(-1, labels[:, None]).squeeze(-1) - normalizer)
            normalizers.append(normalizer)
            all_logprobs = scaled.sub_(normalizer[:, None])
            entropies.append(-(all_logprobs.exp() * all_logprobs).sum(dim=-1))
        ctx.save_for_backward(logits_NV, labels_N, torch.cat(normalizers))
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, labels_N, normalizer_N = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        chunks = (tensor.split(1024) for tensor in (logits_NV, labels_N, normalizer_N, grad_N, grad_logits_NV))
        for logits, labels, normalizer, grad, grad_logits in zip(*chunks):
            scale = (grad / TEMPERATURE)[:, None]
            d_logits = (logits.float() / TEMPERATURE - normalizer[:, None]).exp_().mul_(-scale)
            d_logits.scatter_add_(-1, labels[:, None], scale)
            grad_logits.copy_(d_logits)
        return grad_logits_NV, None


if __name__ == "__main__":
    main()

"""The embedded engine against `model.generate` of transformers: same weights, same prompts, alternating in one run.

    python benchmarks/generation.py [--rounds 5] [--out benchmarks/results/generation.jsonl]

A quarter-million-parameter model, one thread, sampling with logprobs. `uniform` generates exactly 32 tokens for every
prompt, in one batch on both sides, so it compares loops and not batching. `lengths` draws a length per request
(exponential, mean 32, at most 128); `generate` runs batches of 64, as a static loop must, and the engine has 64 slots.
Prints tokens that were asked for per second of process CPU time, medians over the rounds, and the ratio of medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from circumstances import circumstances
from transformers import AutoModelForCausalLM

from arealite.cli.main import main as arealite
from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.generation.request import GenerationRequest, SamplingParams

PROMPT_TOKENS = 32
BATCH = 64


def main() -> None:
    """Measure every case and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the results to this jsonl file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arealite(["tiny-model", "--out", folder])
        path = folder
        for name, num_requests, group in (("uniform", 64, 1), ("uniform", 256, 8), ("lengths", 256, 1)):
            result = measure(path, name, num_requests=num_requests, group=group, rounds=args.rounds)
            theirs, ours = result["generate_tok_per_cpu_s"], result["engine_tok_per_cpu_s"]
            print(
                f"{name:8} {num_requests:4} requests, groups of {group}: generate {theirs:7.0f} tok/CPU-s, "
                f"engine {ours:7.0f}, ratio {result['ratio']:.2f}",
                flush=True,
            )
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result | circumstances()) + "\n")


def measure(path: str, name: str, *, num_requests: int, group: int, rounds: int) -> dict[str, float | int | str]:
    """Run both sides alternately and return medians."""
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 400) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests // group)]
    prompts = [prompt for prompt in prompts for _ in range(group)]
    lengths = [32] * num_requests
    if name == "lengths":
        lengths = [min(128, 1 + int(draw.expovariate(1 / 32))) for _ in prompts]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    slots = BATCH if name == "lengths" else num_requests
    engine = GenerationEngine(ModelRunner(copy.deepcopy(model), slots=slots, context=2048))
    seconds: dict[str, list[float]] = {"generate": [], "engine": []}
    try:
        for _ in range(rounds + 1):  # the first round warms both up
            seconds["generate"].append(cpu_seconds(lambda: generate(model, prompts, lengths, batch=slots)))
            seconds["engine"].append(cpu_seconds(lambda: run_engine(engine, prompts, lengths)))
    finally:
        engine.close()
    rates = {side: sum(lengths) / statistics.median(values[1:]) for side, values in seconds.items()}
    return {
        "case": name,
        "requests": num_requests,
        "group": group,
        "rounds": rounds,
        "generate_tok_per_cpu_s": rates["generate"],
        "engine_tok_per_cpu_s": rates["engine"],
        "ratio": rates["engine"] / rates["generate"],
    }


def cpu_seconds(run: Callable[[], None]) -> float:
    """Return the process CPU time of a call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def generate(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int], *, batch: int) -> None:
    """Sample with transformers, one static batch after the other."""
    for start in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[start : start + batch])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=max(lengths[start : start + batch]),
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
                eos_token_id=None,
            )


def run_engine(engine: GenerationEngine, prompts: list[list[int]], lengths: list[int]) -> None:
    """Sample with the embedded engine."""
    futures = [
        engine.submit(
            GenerationRequest(str(i), tuple(prompt), SamplingParams(max_new_tokens=length, ignore_eos=True, seed=i))
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths))
    ]
    tokens = sum(len(future.result(timeout=600).output_ids) for future in futures)
    assert tokens == sum(lengths), (tokens, sum(lengths))


if __name__ == "__main__":
    main()

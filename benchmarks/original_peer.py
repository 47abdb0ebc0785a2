"""Runs parts of the original, AReaL 1.0, for `original.py`, with its packages in front of ours.

    python benchmarks/original_peer.py ADDRESS CONCURRENCY BATCH_SIZE

Reads `rollout SECONDS` or `pack KIND ROWS ROUNDS` from standard input and writes what was found as one JSON object per
line, until standard input ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, MicroBatchSpec
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.utils.data import (
    allocate_balanced_mbs,
    concat_padded_tensors,
    pack_tensor_dict,
    split_padded_tensor_dict_into_mb_list,
)
from packing import MAX_TOKENS, batch_of, lengths_of, median_ms
from torchdata.stateful_dataloader import StatefulDataLoader

PROMPT_TOKENS, TOKENS = 32, 64


class OneRequest(RolloutWorkflow):
    """One request per episode, with the columns that its own workflows return; the reward is constant."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Sample once."""
        gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=TOKENS)
        response = await engine.agenerate(ModelRequest(input_ids=data["input_ids"], gconfig=gconfig))
        prompt = [0] * response.input_len
        columns = {
            "input_ids": torch.tensor(response.input_tokens + response.output_tokens, dtype=torch.int32),
            "loss_mask": torch.tensor(prompt + [1] * response.output_len, dtype=torch.int32),
            "logprobs": torch.tensor(prompt + response.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * response.input_len + response.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(response.input_len + response.output_len, dtype=torch.bool),
            "rewards": torch.tensor(1.0),
        }
        return {name: column[None] for name, column in columns.items()}


def rollout(engine: RemoteSGLangEngine, loader: StatefulDataLoader, seconds: float) -> dict[str, float]:
    """Take batches, padded as its trainer pads them, for so many seconds."""
    workflow, count = OneRequest(), 0
    began, began_cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        batch = concat_padded_tensors(engine.prepare_batch(loader, workflow))
        assert batch["input_ids"].shape == (loader.batch_size, PROMPT_TOKENS + TOKENS), batch["input_ids"].shape
        engine.set_version(engine.get_version() + 1)
        count += loader.batch_size
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return {"us": 1e6 * wall_s / count, "cpu_us": 1e6 * cpu_s / count}


def pack(kind: str, num_rows: int, rounds: int) -> dict[str, float]:
    """Pack rows as `packing.py` does."""
    lengths = lengths_of(kind, num_rows, random.Random(1))
    batch, spec = batch_of(lengths).to_dict(), MicroBatchSpec(max_tokens_per_mb=MAX_TOKENS)
    plan_ms = median_ms(lambda: allocate_balanced_mbs(spec, lengths), rounds)

    def plan_and_copy() -> None:
        for micro_batch in split_padded_tensor_dict_into_mb_list(batch, spec).mbs:
            pack_tensor_dict(micro_batch)

    groups = allocate_balanced_mbs(spec, lengths)
    return {"micro_batches": len(groups), "plan_ms": plan_ms, "pack_ms": median_ms(plan_and_copy, 3)}


def main() -> None:
    """Do as told until standard input ends."""
    address, concurrency, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no result
    torch.set_num_threads(1)
    config = InferenceEngineConfig(
        experiment_name="original",
        trial_name="rollout",
        fileroot=tempfile.mkdtemp(),
        backend="sglang:d1",
        consumer_batch_size=batch_size,
        max_concurrent_rollouts=concurrency,
        max_head_offpolicyness=16,
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize("0", addr=[address])
    rows = [{"input_ids": list(range(5, 5 + PROMPT_TOKENS))} for _ in range(batch_size)]
    loader = StatefulDataLoader(rows, batch_size=batch_size, collate_fn=list)
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "rollout":
            found = rollout(engine, loader, float(numbers[0]))
        else:
            found = pack(numbers[0], int(numbers[1]), int(numbers[2]))
        print(json.dumps(found), file=out, flush=True)
    os._exit(0)  # its threads have nothing left to do


if __name__ == "__main__":
    main()

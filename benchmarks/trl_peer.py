"""Trains with TRL's GRPOTrainer for `grpo_step.py`, in an environment of its own.

    python benchmarks/trl_peer.py '{"model": ..., "lengths": [[...], ...], ...}'

Reads `steps first` from standard input, takes so many steps with the lengths of the batches from `first` on, and writes
what they took as one JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class GivenLengths(LogitsProcessor):
    """Ends every row after its number of tokens, by the end-of-sequence token, and no row earlier."""

    def __init__(self, lengths: list[int], ends: list[int], prompt_tokens: int) -> None:
        self.lengths, self.ends, self.prompt_tokens = torch.tensor(lengths), ends, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores of the next token `[B, V]`."""
        scores[:, self.ends] = -torch.inf
        is_last = self.lengths <= input_ids.shape[1] - self.prompt_tokens + 1
        scores[is_last] = -torch.inf
        scores[is_last, self.ends[0]] = 0.0
        return scores


class Gate(TrainerCallback):
    """Lets the trainer take as many steps as it is told to."""

    def __init__(self, out: Any) -> None:
        self.out, self.left, self.batch = out, 0, 0
        self.rewards: list[float] = []
        self.num_tokens = 0

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return the share of even token ids of each completion."""
        rewards = [sum(one % 2 == 0 for one in ids) / len(ids) for ids in completion_ids]
        self.rewards.append(sum(rewards) / len(rewards))
        self.num_tokens += sum(map(len, completion_ids))
        return rewards

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the number of steps and the first batch."""
        if self.left == 0:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self.left, self.batch = map(int, line.split())
            self.num_tokens = 0
            self.rewards.clear()
            self.began, self.began_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tell what the steps took."""
        self.left, self.batch = self.left - 1, self.batch + 1
        if self.left == 0:
            found = {"wall_s": time.perf_counter() - self.began, "cpu_s": time.process_time() - self.began_cpu}
            found |= {"tokens": self.num_tokens, "rewards": self.rewards, "trl": trl.__version__}
            print(json.dumps(found), file=self.out, flush=True)


def main() -> None:
    """Train until standard input ends."""
    case = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no result
    torch.set_num_threads(case["threads"])
    lengths, gate = case["lengths"], Gate(out)
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    is_fixed = len({length for row in lengths for length in row}) == 1
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(lengths[0]),
        num_generations=case["group"],
        steps_per_generation=1,
        max_completion_length=max(map(max, lengths)),
        generation_kwargs={"min_new_tokens": lengths[0][0]} if is_fixed else None,
        max_steps=10**6,
        learning_rate=case["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        loss_type="dapo",  # the mean over the tokens of the batch
        seed=case["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        case["model"],
        reward_funcs=gate.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": case["messages"]}] * 1024),
        processing_class=tokenizer,
        callbacks=[gate],
    )
    if not is_fixed:
        generate = trainer.model.generate

        def generate_given(input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
            of_rows = lengths[gate.batch % len(lengths)]
            given = GivenLengths(of_rows, trainer.eos_token_ids, input_ids.shape[1])
            return generate(input_ids=input_ids, **inputs, logits_processor=LogitsProcessorList([given]))

        trainer.model.generate = generate_given
    trainer.train()


if __name__ == "__main__":
    main()

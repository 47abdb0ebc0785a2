"""A run folder as the viewer meets it, written through the store's and the ledger's own writers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testing_rollouts import write_rows
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from arealite.api.io_struct import PromptId
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token per byte."""
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return tokenizer


def row(prompt_id: str, *, step: int, given: str = "2 + 2?", sampled: str = "4", **more: Any) -> dict[str, Any]:
    """Return a row whose first half of sampled tokens is one version older than the other."""
    tokens = [byte_tokenizer().encode(text).ids for text in (given, sampled)]
    num_given, num_sampled = map(len, tokens)
    versions = [max(0, step - 1)] * (num_sampled // 2) + [step] * (num_sampled - num_sampled // 2)
    return {
        "prompt_id": prompt_id, "segments": [{"given": given}, {"sampled": sampled}], "server": "127.0.0.1:1",
        "input_ids": tokens[0] + tokens[1], "loss_mask": [0] * num_given + [1] * num_sampled,
        "logprobs": [0.0] * num_given + [-0.5] * num_sampled, "versions": [-1] * num_given + versions,
    } | more  # fmt: skip


def write_metrics(run: Path, steps: Sequence[int]) -> None:
    """Append a row of metrics for each step."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "reward/mean": step / 10, "optim/grad_norm": 1.0, "time/step_s": 2.0}
            file.write(json.dumps(row) + "\n")


def finish(run: Path, num_steps: int) -> None:
    """Append the row of the last evaluation, as the loops do, and write the summary of a run that is done."""
    row = {"step": num_steps, "eval/version": num_steps, "eval/reward": 0.8, "eval/accuracy": 0.75, "time/step_s": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (run / "summary.json").write_text('{"is_finished": true}')


def write_run(run: Path, *, num_steps: int = 2, is_finished: bool = True) -> Path:
    """Write a run of `num_steps` with two prompts of two samples each, an evaluation, and a ledger with a failure, a
    rejection and a prompt that waits besides."""
    write_metrics(run, range(num_steps))
    if is_finished:
        finish(run, num_steps)
    byte_tokenizer().save(str(run / "tokenizer.json"))
    (run / "config.yaml").write_text(f"experiment_name: e\ntrial_name: {run.name}\nactor: {{path: {run}}}\n")
    for step in range(num_steps):
        ids = [f"0-{2 * step + prompt}" for prompt in range(2)]
        rows = [row(one, step=step, sample=sample, reward=float(sample)) for one in ids for sample in range(2)]
        write_rows(run / f"rollouts/step_{step}", rows)
    write_rows(run / "rollouts/eval_step_0", [row("0-0", step=0, given="Held out?", reward=1.0)])
    ledger = Ledger(
        str(run / "ledger.sqlite"), StalenessAccount(batch_size=2, max_head_offpolicyness=9, max_concurrent=99)
    )
    ledger.rollback(0)
    prompts = [Prompt(PromptId(0, index)) for index in range(2 * num_steps + 3)]
    ledger.issue(prompts, cursor=None)
    for prompt in prompts[:-1]:
        ledger.start(prompt, 0)
    ledger.retry(prompts[0], "server")
    ledger.start(prompts[0], 0)
    record = SampleRecord(0, 5, 1.5, 0, "127.0.0.1:1")
    for index, prompt in enumerate(prompts[:-3]):
        ledger.accept(prompt, [record], 2.5)
        ledger.train([prompt], index // 2)
    ledger.drop(prompts[-3], "failed", "reward_timeout", latency_s=31.0)
    ledger.drop(prompts[-2], "rejected", "filter", [record], 1.0)
    ledger.close()
    return run

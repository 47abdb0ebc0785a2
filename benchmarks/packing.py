"""What packing and dealing out rows leaves unused, and what it takes: no model, one thread.

    python benchmarks/packing.py [--rows 1024] [--rounds 20] [--json] [--out FILE]

`pack`: rows into micro-batches of at most 10,240 tokens. `fill` is the share of their room that tokens take,
`padded_fill` what it would be in a padded batch; `plan_ms` finds the micro-batches, `copy_ms` packs seven columns,
`pack_ms` is both.
Lengths: `lognormal` with a mean of 2,048 (sigma 0.8, at most 8,192), or `half`, 5,300 each: no two fit together.

`deal`: groups of 8 lognormal completions over ranks that meet at every optimizer step, in which a share `dead` of the
groups has no gradient; `deal rows`: a batch of demonstrations. `useful` is the share of their time in which ranks
compute, if time is tokens: mean and least over the rounds, each with lengths of its own.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from circumstances import options, report
from tensordict import TensorDict

from arealite.dataset.loader import PromptLoader, sft_batches
from arealite.rollout.trajectory import deal_groups
from arealite.utils.tensors import count_micro_batches, pack_rows, split_rows, unit_lengths

MAX_TOKENS = 10_240
MEAN, SIGMA, LONGEST = 2048, 0.8, 8192
DEALS = (
    *((2, 4, 64, 0.0), (4, 4, 256, 0.0), (8, 4, 256, 0.0), (16, 4, 256, 0.0), (8, 1, 256, 0.0)),
    *((8, 4, 256, 0.3), (8, 4, 256, 0.5), (8, 1, 256, 0.5)),
)
"""Ranks, minibatches, groups and the share of dead ones."""
ROW_DEALS = ((8, 64), (8, 128), (16, 256))
"""Ranks and rows."""


def lengths_of(kind: str, num_rows: int, draw: random.Random) -> list[int]:
    """Return the tokens of each row."""
    if kind == "half":
        return [5300] * num_rows
    mean = math.log(MEAN) - SIGMA**2 / 2
    return [max(2, min(LONGEST, round(draw.lognormvariate(mean, SIGMA)))) for _ in range(num_rows)]


def batch_of(lengths: list[int]) -> TensorDict:
    """Return a batch of such rows, as an update reads it."""
    attention_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    columns = {"input_ids": attention_mask.long(), "attention_mask": attention_mask, "loss_mask": attention_mask}
    names = ("logprobs", "proximal_logprobs", "advantages", "token_weights")
    return TensorDict(columns | {name: attention_mask.float() for name in names}, batch_size=[len(lengths)])


def plan(mask: torch.Tensor) -> list[list[int]]:
    """Return the rows of each micro-batch."""
    lengths = unit_lengths(mask)
    return split_rows(lengths, count_micro_batches(lengths, 1, MAX_TOKENS), MAX_TOKENS)


def pack(kind: str, num_rows: int, rounds: int) -> dict[str, Any]:
    """Pack rows of one kind."""
    lengths = lengths_of(kind, num_rows, random.Random(1))
    batch = batch_of(lengths)
    mask = batch["attention_mask"]
    groups = plan(mask)
    return {
        "case": f"pack {kind}",
        "rows": num_rows,
        "tokens": sum(lengths),
        "micro_batches": len(groups),
        "fill": sum(lengths) / (len(groups) * MAX_TOKENS),
        "padded_fill": sum(lengths) / mask.numel(),
        "plan_ms": median_ms(lambda: plan(mask), rounds),
        "copy_ms": median_ms(lambda: [pack_rows(batch, group) for group in groups], 3),
        "pack_ms": median_ms(lambda: [pack_rows(batch, group) for group in plan(mask)], 3),
    }


def median_ms(action: Callable[[], object], rounds: int) -> float:
    """Return the median of the milliseconds that it takes."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def deal(num_ranks: int, num_minibatches: int, num_groups: int, dead: float, rounds: int) -> dict[str, Any]:
    """Deal out groups."""
    useful = []
    for seed in range(rounds):
        draw = random.Random(seed)
        lengths = torch.tensor(lengths_of("lognormal", 8 * num_groups, draw))
        rewards = torch.zeros(num_groups, 8)
        rewards[:, 0] = torch.tensor([draw.random() >= dead for _ in range(num_groups)])
        tokens = lengths.view(num_groups, 8).sum(1)
        shares = deal_groups(tokens.tolist(), rewards[:, 0].bool().tolist(), num_ranks, num_minibatches)
        loads = torch.zeros(num_ranks, num_minibatches, dtype=torch.int64)
        for rank, groups in enumerate(map(torch.tensor, shares)):
            loads[rank].index_add_(0, groups % num_minibatches, tokens[groups] * rewards[groups, 0].long())
        useful.append((loads.sum() / (num_ranks * loads.max(dim=0).values.sum())).item())
    sizes = {"ranks": num_ranks, "minibatches": num_minibatches, "groups": num_groups, "dead": dead}
    return {"case": "deal", **sizes, "useful": statistics.fmean(useful), "useful_least": min(useful)}


def deal_rows(num_ranks: int, num_rows: int, rounds: int) -> dict[str, Any]:
    """Deal out demonstrations."""
    useful = []
    for seed in range(rounds):
        lengths = lengths_of("lognormal", num_rows, random.Random(seed))
        rows = [{"input_ids": [0] * length, "loss_mask": [1] * length} for length in lengths]
        of_ranks = (sft_batches(PromptLoader(rows, num_rows), 0, rank, num_ranks) for rank in range(num_ranks))
        loads = [next(batches)["attention_mask"].sum().item() for batches in of_ranks]
        useful.append(sum(loads) / (num_ranks * max(loads)))
    sizes = {"ranks": num_ranks, "rows": num_rows}
    return {"case": "deal rows", **sizes, "useful": statistics.fmean(useful), "useful_least": min(useful)}


def measured(num_rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure one case after the other."""
    for kind in ("lognormal", "half"):
        yield pack(kind, num_rows, rounds)
    for sizes in DEALS:
        yield deal(*sizes, rounds)
    for num_ranks, num_in_batch in ROW_DEALS:
        yield deal_rows(num_ranks, num_in_batch, rounds)


def main() -> None:
    """Measure and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for found in measured(args.rows, args.rounds):
        report(args, {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()})


if __name__ == "__main__":
    main()

"""Steps on preference pairs: row 2i is the chosen completion, row 2i + 1 the rejected one, in the same micro-batch.

The loss is a mean over the pairs of the whole batch on all ranks.
"""

# N packed tokens, B rows, P pairs

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from arealite.algorithms.preferences import PairLosses
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.metrics import MaskedMetrics, of_steps
from arealite.utils.distributed import all_reduce_numbers

PairLossFn = Callable[[Any, TensorDict], PairLosses]
"""`(outputs of the model, micro_batch) -> (losses [P], statistics [P] by name)`."""


def train_pairs(engine: FSDPEngine, columns: TensorDict, loss_fn: PairLossFn, *, group: str) -> dict[str, float]:
    """Take one optimizer step and one of the schedule; return metrics named `group/...`, equal on all ranks."""
    metrics = MaskedMetrics()
    result = engine.train_batch(columns, _mean(loss_fn, metrics), _num_pairs, rows_per_unit=2)
    engine.step_lr_scheduler()
    statistics = metrics.reduce()
    (num_tokens,) = all_reduce_numbers([columns["attention_mask"].sum().item()], group=engine.parallelism_group)
    return {
        f"{group}/loss": result["loss"],
        **engine.costs.take(),
        **{f"{group}/{name}": value for name, value in statistics.items()},
        **of_steps([result], "optim"),
        "perf/processed_tokens": num_tokens,
    }


def evaluate_pairs(engine: FSDPEngine, columns: TensorDict, loss_fn: PairLossFn) -> dict[str, float]:
    """Return the loss and the metrics of `train_pairs` as `eval/...`, without training."""
    metrics = MaskedMetrics()
    loss = engine.eval_batch(columns, _mean(loss_fn, metrics), _num_pairs, rows_per_unit=2)
    statistics = metrics.reduce()
    return {"eval/loss": loss, **{f"eval/{name}": value for name, value in statistics.items()}}


def _num_pairs(micro_batch: TensorDict) -> float:
    return (len(micro_batch["cu_seqlens"]) - 1) / 2


def _mean(loss_fn: PairLossFn, metrics: MaskedMetrics) -> Callable[[Any, TensorDict], torch.Tensor]:
    def mean_loss(outputs: Any, micro_batch: TensorDict) -> torch.Tensor:
        losses_P, statistics = loss_fn(outputs, micro_batch)
        metrics.add(torch.ones_like(losses_P), statistics)
        return losses_P.mean()

    return mean_loss

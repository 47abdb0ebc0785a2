"""Supervised fine-tuning of a language model.

A batch has `input_ids`, `attention_mask` and `loss_mask`, all `[B, T]`; the loss is a mean over the tokens under
`loss_mask` of the whole batch on all ranks.
"""

# N packed tokens

import math

import torch
from tensordict import TensorDict

from arealite.algorithms.logprobs import LazyLogits, count_loss_tokens, packed_logprobs, trained_tokens
from arealite.api.cli_args import TrainEngineConfig
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.metrics import of_steps
from arealite.utils.distributed import all_reduce_numbers
from arealite.utils.tensors import INPUTS


class LMEngine:
    """Runs supervised fine-tuning on an engine. Every method is collective."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.engine = engine

    def train_lm(self, batch: TensorDict) -> dict[str, float]:
        """Take one optimizer step and one of the schedule; return metrics, equal on all ranks."""
        columns = _columns(batch)
        result = self.engine.train_batch(columns, sft_loss_fn, count_loss_tokens)
        self.engine.step_lr_scheduler()
        counts = [columns["attention_mask"].sum().item(), columns["loss_mask"].sum().item()]
        num_tokens, num_trained = all_reduce_numbers(counts, group=self.engine.parallelism_group)
        return {
            "sft/loss": result["loss"],
            **self.engine.costs.take(),
            "sft/ppl": math.exp(min(result["loss"], 100.0)),
            **of_steps([result], "optim"),
            "perf/processed_tokens": num_tokens,
            "perf/trained_tokens": num_trained,
        }

    def evaluate_lm(self, batch: TensorDict) -> float:
        """Return the loss of `train_lm`, without training."""
        return self.engine.eval_batch(_columns(batch), sft_loss_fn, count_loss_tokens)


class FSDPLMEngine(FSDPEngine, LMEngine):
    """A language model on FSDP2."""

    def __init__(self, config: TrainEngineConfig) -> None:
        FSDPEngine.__init__(self, config)
        LMEngine.__init__(self, engine=self)


def sft_loss_fn(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
    """Return the mean negative log-likelihood of the packed tokens under `loss_mask [N]`."""
    mask_N = micro_batch["loss_mask"].bool()
    logprobs_N = packed_logprobs(logits, micro_batch["input_ids"], micro_batch["cu_seqlens"], mask=mask_N)
    return -logprobs_N.sum() / mask_N.sum()


def _columns(batch: TensorDict) -> TensorDict:
    columns = batch.select(*INPUTS, strict=False)
    columns["loss_mask"] = trained_tokens(batch["attention_mask"], batch["loss_mask"])
    return columns

"""Reward models, trained on preference pairs: row 2i of a batch is the chosen completion, row 2i + 1 the rejected one.

A batch has `input_ids` and `attention_mask`, `[B, T]`. The score of a row is the value of its last token. The bounds of
the packed rows locate it, so the score is right even if the padding token also ends completions.
"""

# B rows, T padded tokens, N packed tokens

import torch
from tensordict import TensorDict

from arealite.algorithms.preferences import PairLosses, bradley_terry, last_tokens
from arealite.api.cli_args import RWEngineConfig
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.pairs import evaluate_pairs, train_pairs


class RWEngine:
    """Trains a reward model on an engine with a value head. Every method is collective."""

    def __init__(self, config: RWEngineConfig, engine: FSDPEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_scores(self, batch: TensorDict) -> torch.Tensor:
        """Return the score `[B]` of every row."""
        columns = _columns(batch)
        values_BT = self.engine.forward(columns, lambda values_N, _: values_N)
        positions_T = torch.arange(values_BT.shape[1], device=values_BT.device)
        last_B = (columns["attention_mask"].bool() * positions_T).argmax(dim=1, keepdim=True)
        return values_BT.gather(1, last_B).squeeze(1)

    def train_rw(self, batch: TensorDict) -> dict[str, float]:
        """Take one optimizer step and one of the schedule; return metrics `rw/...`, equal on all ranks."""
        return train_pairs(self.engine, _columns(batch), self._losses, group="rw")

    def evaluate_rw(self, batch: TensorDict) -> dict[str, float]:
        """Return the loss and metrics of `train_rw` as `eval/...`, without training."""
        return evaluate_pairs(self.engine, _columns(batch), self._losses)

    def _losses(self, values_N: torch.Tensor, micro_batch: TensorDict) -> PairLosses:
        return bradley_terry(last_tokens(values_N, micro_batch["cu_seqlens"]), center=self.config.center)


class FSDPRWEngine(FSDPEngine, RWEngine):
    """A reward model on FSDP2."""

    config: RWEngineConfig

    def __init__(self, config: RWEngineConfig) -> None:
        FSDPEngine.__init__(self, config, has_value_head=True)
        RWEngine.__init__(self, config, engine=self)


def _columns(batch: TensorDict) -> TensorDict:
    return batch.select("input_ids", "attention_mask")

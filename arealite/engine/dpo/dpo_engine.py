"""Direct preference optimisation: a policy learns from preference pairs, relative to a frozen reference.

A batch has `input_ids`, `attention_mask`, `loss_mask` and the reference's logprobs, `ref_logprobs`, all `[B, T]`. Row
2i is the chosen completion of a pair, row 2i + 1 the rejected one.
"""

# B rows, T padded tokens, N packed tokens

import torch
from tensordict import TensorDict

from arealite.algorithms.logprobs import LazyLogits, packed_logprobs, trained_tokens
from arealite.algorithms.preferences import PairLosses, completion_log_ratios, dpo, ipo
from arealite.algorithms.ratios import completion_sums
from arealite.api.cli_args import DPOEngineConfig
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.pairs import evaluate_pairs, train_pairs


class DPOEngine:
    """Runs DPO or IPO on an engine. Every method is collective."""

    def __init__(self, config: DPOEngineConfig, engine: FSDPEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_logprobs(self, batch: TensorDict) -> torch.Tensor:
        """Return the logprob `[B, T]` of every token, 0 for padding and first tokens.

        Those of the reference are the key `ref_logprobs` of a batch.
        """
        return self.engine.forward(
            batch.select("input_ids", "attention_mask"),
            lambda logits, micro_batch: packed_logprobs(logits, micro_batch["input_ids"], micro_batch["cu_seqlens"]),
        )

    def train_dpo(self, batch: TensorDict) -> dict[str, float]:
        """Take one optimizer step and one of the schedule; return metrics `dpo/...`, equal on all ranks.

        Rewards are beta times the log ratio to the reference, margins their difference within a pair.
        """
        return train_pairs(self.engine, _columns(batch), self._losses, group="dpo")

    def evaluate_dpo(self, batch: TensorDict) -> dict[str, float]:
        """Return the loss and metrics of `train_dpo` as `eval/...`, without training."""
        return evaluate_pairs(self.engine, _columns(batch), self._losses)

    def _losses(self, logits: LazyLogits, micro_batch: TensorDict) -> PairLosses:
        tokens, mask_N = (micro_batch["input_ids"], micro_batch["cu_seqlens"]), micro_batch["loss_mask"].bool()
        logprobs_N = packed_logprobs(logits, *tokens, mask=mask_N)
        is_ipo = self.config.loss_type == "ipo"
        log_ratios_B = completion_log_ratios(logprobs_N, micro_batch, per_token=is_ipo)
        beta = self.config.beta
        losses_P, statistics = ipo(log_ratios_B, tau=beta) if is_ipo else dpo(log_ratios_B, beta=beta)
        num_rows = len(micro_batch["cu_seqlens"]) - 1
        logprobs_B = completion_sums(logprobs_N.detach(), mask_N, micro_batch["segment_ids"], num_rows)
        statistics |= {"chosen_logprob": logprobs_B[0::2], "rejected_logprob": logprobs_B[1::2]}
        return losses_P, statistics


class FSDPDPOEngine(FSDPEngine, DPOEngine):
    """The policy on FSDP2; without an optimizer, the frozen reference."""

    config: DPOEngineConfig

    def __init__(self, config: DPOEngineConfig) -> None:
        FSDPEngine.__init__(self, config)
        DPOEngine.__init__(self, config, engine=self)


def _columns(batch: TensorDict) -> TensorDict:
    if "ref_logprobs" not in batch:
        raise ValueError(
            f"a batch of pairs must have 'ref_logprobs': got {sorted(batch.keys())}. Set it to "
            "ref.compute_logprobs(batch)."
        )
    columns = batch.select("input_ids", "attention_mask", "ref_logprobs")
    columns["loss_mask"] = trained_tokens(batch["attention_mask"], batch["loss_mask"])
    return columns

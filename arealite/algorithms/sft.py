"""The loss of supervised fine-tuning."""

# N packed tokens

import torch
from tensordict import TensorDict

from arealite.algorithms.logprobs import packed_logprobs


def sft_loss_fn(logits: torch.Tensor, micro_batch: TensorDict) -> torch.Tensor:
    """Return the mean negative log-likelihood of the packed tokens under `loss_mask [N]`, from `logits [N, V]`."""
    logprobs_N = packed_logprobs(logits, micro_batch["input_ids"], micro_batch["cu_seqlens"])
    mask_N = micro_batch["loss_mask"].bool()
    return -logprobs_N[mask_N].mean()

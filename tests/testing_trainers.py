"""What tests of weights do with a trainer of a tiny model: move its weights, and score completions by them."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from arealite.api.io_struct import ModelResponse
from arealite.engine.ppo.actor import FSDPPPOActor

PROMPT = [5, 9, 13, 4]


def batch_of(tokens: list[int]) -> TensorDict:
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    return TensorDict({"input_ids": torch.tensor([tokens]), "attention_mask": mask}, [1])


def train_a_step(actor: FSDPPPOActor) -> None:
    """Move the weights far enough that logprobs tell them apart."""
    actor.train()
    loss = lambda logits, mb: logits.dense().log_softmax(-1)[:, 7].mean().neg()  # noqa: E731
    actor.train_batch(batch_of([*PROMPT, 7, 8]), loss, lambda mb: 1.0)


def trainers_logprobs(actor: FSDPPPOActor, response: ModelResponse) -> list[float]:
    """Return what the trainer says of the tokens that were sampled."""
    scored = actor.compute_logprobs(batch_of(response.input_tokens + response.output_tokens))
    logprobs: list[float] = scored[0, len(response.input_tokens) :].tolist()
    return logprobs

"""Logarithms of probability ratios, and their means over answers.

Invariant: what this returns is finite, whatever masked positions hold and however far two policies are apart.
"""

# N packed tokens, S answers of a micro-batch

from collections.abc import Collection

import torch

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios count as at most this, either way: beyond 88 their exponential is infinite in float32, and one
such token would make the whole gradient NaN."""


def masked_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the difference of two logprobs `[any shape]`, within +-MAX_LOG_RATIO, and 0 outside of the bool `mask`."""
    return torch.where(mask, numerator - denominator, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def answer_sums(values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_answers: int) -> torch.Tensor:
    """Return `[S]`: the sums of `values [N]` under the bool `mask [N]`, over the tokens of each of S `num_answers`."""
    return values.new_zeros(num_answers).index_add(0, segment_ids.long(), torch.where(mask, values, 0.0))


def answer_means(values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_answers: int) -> torch.Tensor:
    """Return `[S]`: the means of `values [N]` under the bool `mask [N]`; an answer without such tokens gets 0."""
    counts_S = answer_sums(torch.ones_like(values), mask, segment_ids, num_answers)
    return answer_sums(values, mask, segment_ids, num_answers) / counts_S.clamp(min=1)


def answer_means_of_tokens(values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return `[N]`: for each token the mean of its answer, where every answer of the micro-batch has a token."""
    ids_N = segment_ids.long()
    return answer_means(values, mask, ids_N, num_answers=len(ids_N))[ids_N]  # at most N: no sync for their number


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}. Choose one of these.")

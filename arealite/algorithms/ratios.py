"""Logarithms of probability ratios, and their means over completions.

Invariant: results are finite, for any values at masked positions and any distance between two policies.
"""

# N packed tokens, C completions of a micro-batch

from collections.abc import Collection

import torch

MAX_LOG_RATIO = 20.0
"""Bound of log ratios in both directions: beyond 88 the exponential is infinite in float32, and one such token would
make the whole gradient NaN."""


def masked_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the difference of two logprobs `[any shape]`, within +-MAX_LOG_RATIO, and 0 outside of the bool `mask`."""
    return torch.where(mask, numerator - denominator, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def completion_sums(
    values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_completions: int
) -> torch.Tensor:
    """Return `[C]`: the sum of `values [N]` under the bool `mask [N]` over the tokens of each completion."""
    return values.new_zeros(num_completions).index_add(0, segment_ids.long(), torch.where(mask, values, 0.0))


def completion_means(
    values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, num_completions: int
) -> torch.Tensor:
    """Return `[C]`: the mean of `values [N]` under the bool `mask [N]`, 0 for a completion without such tokens."""
    counts_S = completion_sums(torch.ones_like(values), mask, segment_ids, num_completions)
    return completion_sums(values, mask, segment_ids, num_completions) / counts_S.clamp(min=1)


def completion_means_of_tokens(values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return `[N]`: the mean of each token's completion; every completion of the micro-batch must have a token."""
    ids_N = segment_ids.long()
    return completion_means(values, mask, ids_N, num_completions=len(ids_N))[
        ids_N
    ]  # at most N: no sync for their number


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}. Choose one of these.")

"""Samples the next token of every row. Invariant: it depends on the row's logits, parameters, seed and absolute
position alone, not on other rows or interruptions, so random numbers are a hash and not a stream."""

# n rows, V vocabulary

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from arealite.generation.request import SamplingParams
from arealite.utils.seeding import splitmix64
from arealite.utils.tensors import on_device

_RANDOM_BITS = 48  # few enough that u * total < total holds in float64 for every u < 1


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), `[n]`, as splitmix64 of seeds and positions, `[n]`."""
    with np.errstate(over="ignore"):
        state = splitmix64(seeds.astype(np.uint64)) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = splitmix64(state) >> np.uint64(64 - _RANDOM_BITS)
    return bits.astype(np.float64) * 2.0**-_RANDOM_BITS


class SamplingRows:
    """The parameters of n rows as tensors, `[n]`, reused until the rows change."""

    def __init__(
        self,
        rows: Sequence[tuple[SamplingParams, int, frozenset[int]]],
        vocab_size: int,
        device: torch.device | None = None,
    ) -> None:
        """Take (parameters, prompt length, stop tokens) of each row, and the device of their logits."""
        params = [row[0] for row in rows]
        self.seeds = np.array([p.seed & (2**64 - 1) for p in params], dtype=np.uint64)
        greedy = torch.tensor([p.greedy for p in params])
        temperatures = torch.tensor([1.0 if p.greedy else p.temperature for p in params])
        top_p = torch.tensor([1.0 if p.greedy else p.top_p for p in params], dtype=torch.float64)
        top_k = torch.tensor([vocab_size if p.greedy or p.top_k < 0 else min(p.top_k, vocab_size) for p in params])
        min_p = torch.tensor([0.0 if p.greedy else p.min_p for p in params])
        self.min_length = np.array([prompt_length + p.min_new_tokens for p, prompt_length, _ in rows])
        self.has_greedy = bool(greedy.any())
        self.has_temperature = bool((temperatures != 1.0).any())
        self.has_truncation = bool(((top_p < 1.0) | (top_k < vocab_size) | (min_p > 0.0)).any())
        self.greedy, self.temperatures = greedy.to(device), temperatures.to(device)
        self.top_p, self.top_k, self.min_p = top_p.to(device), top_k.to(device), min_p.to(device)
        self.stop_mask: torch.Tensor | None = None
        if any(p.min_new_tokens > 0 for p in params):
            stop_mask = np.zeros((len(rows), vocab_size), dtype=np.bool_)
            for row, (_, _, stop_ids) in zip(stop_mask, rows, strict=True):
                row[list(stop_ids)] = True
            self.stop_mask = torch.from_numpy(stop_mask).to(device)


def sample(
    logits_nV: torch.Tensor, rows: SamplingRows, positions: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample tokens at `positions`, `[n]`, from `[n, V]` logits; return them, and logprobs of them and of all ids."""
    logprobs_nV = sampled_logprobs(logits_nV, rows, positions)
    cdf_nV = logprobs_nV.exp().cumsum(-1, dtype=torch.float64)
    u_n = on_device(torch.from_numpy(uniform(rows.seeds, positions)), cdf_nV.device)
    tokens_n = torch.searchsorted(cdf_nV, (u_n * cdf_nV[:, -1])[:, None], right=True)[:, 0]
    if rows.has_greedy:
        tokens_n = torch.where(rows.greedy, logprobs_nV.argmax(-1), tokens_n)
    tokens_n = tokens_n.clamp_max(logits_nV.shape[-1] - 1)  # NaN rows end past it; the engine fails them
    return tokens_n, logprobs_nV.gather(-1, tokens_n[:, None])[:, 0], logprobs_nV


def kept_ids(logprobs_nV: torch.Tensor) -> list[list[int]]:
    """Return the ids, ascending, that each row of `sampled_logprobs` can sample."""
    rows_M, ids_M = (logprobs_nV > -torch.inf).nonzero(as_tuple=True)
    counts_n = rows_M.bincount(minlength=len(logprobs_nV))
    return [ids.tolist() for ids in ids_M.split(counts_n.tolist())]


def sampled_logprobs(logits_nV: torch.Tensor, rows: SamplingRows, positions: NDArray[np.int64]) -> torch.Tensor:
    """Return the logprobs that tokens are sampled from, `[n, V]`."""
    logits_nV = logits_nV.float()
    if rows.stop_mask is not None:
        too_early_n = on_device(torch.from_numpy(positions < rows.min_length), logits_nV.device)
        logits_nV = logits_nV.masked_fill(rows.stop_mask & too_early_n[:, None], -torch.inf)
    if rows.has_temperature:
        logits_nV = logits_nV / rows.temperatures[:, None]
    logprobs_nV = logits_nV.log_softmax(-1)
    if rows.has_truncation:
        logprobs_nV = _truncate(logprobs_nV, rows)
    return logprobs_nV


def _truncate(logprobs_nV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Keep a token if fewer than top_k tokens and less than top_p of the mass precede it, and if it is at least min_p
    times as likely as the likeliest; renormalize, `[n, V]`."""
    sorted_nV, order_nV = logprobs_nV.sort(stable=True, dim=-1, descending=True)
    mass_nV = sorted_nV.exp().double()
    mass_before_nV = mass_nV.cumsum(-1) - mass_nV
    rank_V = torch.arange(logprobs_nV.shape[-1], device=logprobs_nV.device)
    cut_nV = (rank_V >= rows.top_k[:, None]) | ((mass_before_nV >= rows.top_p[:, None]) & (rows.top_p < 1.0)[:, None])
    cut_nV |= sorted_nV - sorted_nV[:, :1] < rows.min_p.log()[:, None]
    cut_nV[:, 0] = False
    kept_nV = logprobs_nV.masked_fill(torch.zeros_like(cut_nV).scatter(-1, order_nV, cut_nV), -torch.inf)
    is_cut_n = cut_nV.any(-1, keepdim=True)
    return torch.where(is_cut_n, kept_nV.log_softmax(-1), logprobs_nV)

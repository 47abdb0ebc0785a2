from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.generation.request import SamplingParams
from arealite.generation.sampler import SamplingRows, kept_ids, sample, sampled_logprobs, uniform

DRAWS = 20_000


def rows_of(params: SamplingParams, count: int, vocab_size: int, *, stop: frozenset[int] = frozenset()) -> SamplingRows:
    rows = SamplingRows([(params, 4, stop)] * count, vocab_size)
    rows.seeds = np.arange(count, dtype=np.uint64)
    return rows


def draw(params: SamplingParams, logits: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows_of(params, DRAWS, len(logits))
    return sample(torch.tensor(logits).expand(DRAWS, -1), rows, np.full(DRAWS, 7))[:2]


def chi_square(tokens: torch.Tensor, probabilities: list[float]) -> float:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = torch.tensor(probabilities, dtype=torch.float64) * len(tokens)
    likely = expected > 0
    assert counts[~likely].sum() == 0
    return float(((counts - expected)[likely] ** 2 / expected[likely]).sum())


# log of 0.4, 0.3, 0.2, 0.1 plus a constant, because logits are not normalised
LOGITS = [float(np.log(p)) + 2.0 for p in (0.3, 0.1, 0.4, 0.2)]


@pytest.mark.parametrize(
    ("params", "probabilities"),
    [
        (SamplingParams(), [0.3, 0.1, 0.4, 0.2]),
        (SamplingParams(temperature=0.5), [9 / 30, 1 / 30, 16 / 30, 4 / 30]),
        (SamplingParams(top_k=2), [3 / 7, 0, 4 / 7, 0]),
        (SamplingParams(top_p=0.6), [3 / 7, 0, 4 / 7, 0]),
        (SamplingParams(top_p=0.71), [3 / 9, 0, 4 / 9, 2 / 9]),
        (SamplingParams(top_p=0.95, top_k=3), [3 / 9, 0, 4 / 9, 2 / 9]),
        (SamplingParams(top_p=1e-6), [0, 0, 1, 0]),
        (SamplingParams(temperature=0.5, top_p=0.5), [0, 0, 1, 0]),
        (SamplingParams(min_p=0.3), [3 / 9, 0, 4 / 9, 2 / 9]),
        (SamplingParams(min_p=0.4, temperature=0.5), [9 / 25, 0, 16 / 25, 0]),
        (SamplingParams(min_p=0.3, top_k=2), [3 / 7, 0, 4 / 7, 0]),
        (SamplingParams(min_p=1.0), [0, 0, 1, 0]),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_truncated_distribution(
    params: SamplingParams, probabilities: list[float]
) -> None:
    tokens, logprobs = draw(params, LOGITS)
    assert chi_square(tokens, probabilities) < 16.3  # 99.9 % of chi-square with 3 degrees of freedom
    assert torch.allclose(logprobs.exp(), torch.tensor(probabilities, dtype=torch.float32)[tokens], atol=1e-6)
    of_all = sampled_logprobs(torch.tensor([LOGITS]), rows_of(params, 1, 4), np.array([7]))
    assert kept_ids(of_all) == [[token for token, probability in enumerate(probabilities) if probability > 0]]


def test_greedy_takes_the_largest_and_reports_the_full_distribution() -> None:
    tokens, logprobs = draw(SamplingParams(temperature=0.0, top_p=0.1, top_k=1), LOGITS)
    assert set(tokens.tolist()) == {2}
    assert torch.allclose(logprobs.exp(), torch.tensor(0.4))


def test_stop_tokens_are_banned_until_min_new_tokens() -> None:
    rows = rows_of(SamplingParams(min_new_tokens=3), 1, 4, stop=frozenset({2}))
    before = sampled_logprobs(torch.tensor([LOGITS]), rows, np.array([6])).exp()
    after = sampled_logprobs(torch.tensor([LOGITS]), rows, np.array([7])).exp()
    assert torch.allclose(before, torch.tensor([[3 / 6, 1 / 6, 0, 2 / 6]]))
    assert torch.allclose(after, torch.tensor([[0.3, 0.1, 0.4, 0.2]]))


def test_random_numbers_are_uniform_and_uncorrelated_along_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    u = uniform(seeds.ravel(), positions.ravel()).reshape(300, 300)
    assert u.min() >= 0 and u.max() < 1
    counts, _ = np.histogram(u, 100, (0, 1))
    assert ((counts - 900) ** 2 / 900).sum() < 149.5  # 99.9 % of chi-square with 99 degrees of freedom
    for neighbours in (u[1:] * u[:-1], u[:, 1:] * u[:, :-1]):
        assert abs(neighbours.mean() - 0.25) < 0.004


def test_random_numbers_stay_the_same_between_releases() -> None:
    drawn = uniform(np.array([0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 5, 10**6]))
    assert drawn.tolist() == [0.6524484863740305, 0.7743991716671985, 0.46113146840768593]


@given(data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    num_rows, vocab = data.draw(st.integers(2, 9)), data.draw(st.integers(2, 70))
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))) * 3
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
            top_p=data.draw(st.sampled_from([0.2, 0.9, 1.0])),
            top_k=data.draw(st.sampled_from([-1, 1, 5, 10**8])),
            min_new_tokens=data.draw(st.integers(0, 2)),
            seed=data.draw(st.integers(-(2**70), 2**70)),
        )
        for _ in range(num_rows)
    ]
    everyone = [(p, 3, frozenset({0})) for p in params]
    positions = np.arange(3, 3 + num_rows)
    tokens, logprobs, of_all = sample(logits, SamplingRows(everyone, vocab), positions)
    for token, ids, row_V in zip(tokens.tolist(), kept_ids(of_all), of_all):
        assert token in ids and row_V[ids].logsumexp(-1).item() == pytest.approx(0.0, abs=1e-6)
    for row in range(num_rows):
        alone = sample(logits[row : row + 1], SamplingRows(everyone[row : row + 1], vocab), positions[row : row + 1])
        assert alone[0].item() == tokens[row].item()
        assert alone[1].item() == logprobs[row].item()
        assert logprobs[row] > -torch.inf

"""Batches and their split over ranks."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from testing_workflows import waiting_trajectory

from arealite.api.io_struct import ModelRequest, PromptId
from arealite.rollout.prompts import Episode, Prompt, sampling_seed
from arealite.rollout.trajectory import assemble_batch, check_trajectory, split_batch
from arealite.utils.tensors import concat_padded_tensors


def group(index: int, num_samples: int, length: int) -> TensorDict:
    return concat_padded_tensors([waiting_trajectory(index, 0, length) for _ in range(num_samples)])


def test_a_batch_numbers_its_episodes() -> None:
    batch = assemble_batch([group(7, 2, 3), group(8, 1, 5), group(9, 3, 2)])
    assert batch["group_index"].tolist() == [0, 0, 1, 2, 2, 2]
    assert batch["input_ids"][:, 0].tolist() == [7, 7, 8, 9, 9, 9]
    assert batch["attention_mask"].sum(1).tolist() == [3, 3, 5, 2, 2, 2]
    assert batch["versions"][0].tolist() == [-1, 0, 0, -1, -1]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(2, 30)), min_size=1, max_size=12), shares=st.integers(1, 5)
)
def test_a_split_keeps_groups_whole_and_loses_nothing(shapes: list[tuple[int, int]], shares: int) -> None:
    batch = assemble_batch([group(index, *shape) for index, shape in enumerate(shapes)])
    parts = split_batch(batch, shares)
    assert len(parts) == shares
    groups = [set(part["group_index"].tolist()) for part in parts]
    assert sum(len(one) for one in groups) == len(set().union(*groups)) == len(shapes)
    assert all(part["group_index"].tolist() == sorted(part["group_index"].tolist()) for part in parts)
    joined = concat_padded_tensors(parts)
    assert sorted(joined["input_ids"].tolist()) == sorted(batch["input_ids"].tolist())
    assert all(part["versions"].shape[1] == max([1, *part["attention_mask"].sum(1).tolist()]) for part in parts)


@given(sizes=st.lists(st.integers(2, 100), min_size=1, max_size=30), shares=st.integers(1, 8))
def test_shares_have_about_equal_tokens(sizes: list[int], shares: int) -> None:
    batch = assemble_batch([group(index, 1, size) for index, size in enumerate(sizes)])
    loads = [int(part["attention_mask"].sum()) for part in split_batch(batch, shares)]
    assert max(loads) <= sum(sizes) / shares + max(sizes)


def test_a_split_by_hand() -> None:
    batch = assemble_batch([group(index, 1, size) for index, size in enumerate([5, 2, 4, 4])])
    # 5 | 4, then 4 | 4 + 4 > 5, so 2 goes beside the 5; the first share is the one with the most
    assert [part["group_index"].tolist() for part in split_batch(batch, 2)] == [[2, 3], [0, 1]]
    assert [part["group_index"].tolist() for part in split_batch(batch[:2], 3)] == [[0], [1], []]


def test_every_minibatch_is_dealt_over_the_shares_by_hand() -> None:
    batch = assemble_batch([group(index, 1, size) for index, size in enumerate([9, 9, 2, 3, 7, 6])])
    # minibatch 0 has groups of 9, 2 and 7 tokens: 9 | 7 + 2; minibatch 1 of 9, 3 and 6: 9 | 6 + 3
    shares = [part["group_index"].tolist() for part in split_batch(batch, 2, 2)]
    assert shares == [[0, 1], [2, 3, 4, 5]]
    batch = assemble_batch([group(index, 1, size) for index, size in enumerate([9, 8, 2, 3])])
    shares = [part["group_index"].tolist() for part in split_batch(batch, 2, 2)]
    assert shares == [[0, 3], [1, 2]], "9 | 2, then the 8 to the second, which has fewer"


def test_groups_with_and_without_spread_are_dealt_apart_by_hand() -> None:
    batch = assemble_batch([group(index, 2, size) for index, size in enumerate([9, 8, 7, 2, 3])])
    for index in (1, 2, 3):
        batch["rewards"][2 * index] += 1
    # groups 1, 2 and 3 have spread: 14 + 4 | 16 tokens; of the others 6 | 18, the most to the second, which has fewer
    assert [part["group_index"].unique().tolist() for part in split_batch(batch, 2)] == [[2, 3, 4], [0, 1]]

    without = batch.exclude("rewards")
    assert [part["group_index"].unique().tolist() for part in split_batch(without, 2)] == [[1, 2], [0, 3, 4]]


def lognormal_lengths(seed: int, num_groups: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (7 * torch.randn(num_groups, generator=generator).mul(0.3).exp()).mul(8).int().add(2).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_dead", "bound"), [(0, 0.97), (30, 0.95)])
def test_ranks_hardly_wait_for_each_other_in_a_minibatch(seed: int, num_dead: int, bound: float) -> None:
    """The share of useful time: tokens over ranks times those of the rank with the most, minibatch by minibatch."""
    lengths = lognormal_lengths(seed, 64)
    batch = assemble_batch([group(index, 2, length) for index, length in enumerate(lengths)])
    dead = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:num_dead]
    batch["rewards"][::2] += 1
    batch["rewards"][2 * dead] -= 1
    live = ~torch.isin(batch["group_index"], dead)

    def useful(num_minibatches: int, trained: torch.Tensor) -> float:
        batch["trained"] = batch["attention_mask"].sum(dim=1) * trained
        parts, waited = split_batch(batch, 2, num_minibatches), 0
        for index in range(4):
            waited += max(int(part["trained"][part["group_index"] % 4 == index].sum()) for part in parts)
        return int(batch["trained"].sum()) / (2 * waited)

    assert useful(4, live) > bound > useful(1, live)
    assert useful(4, torch.ones_like(live)) > bound, "nor where groups without spread are trained on"


def test_sampling_seeds_differ_by_what_names_a_completion() -> None:
    seeds = {
        sampling_seed(run, PromptId(epoch, index), sample=sample, attempt=attempt)
        for run in (1, 2)
        for epoch in (0, 1)
        for index in (0, 1, 11)
        for sample in (0, 1)
        for attempt in (0, 1)
    }
    assert len(seeds) == 48 and max(seeds) < 2**48
    assert sampling_seed(1, PromptId(0, 0), sample=0, attempt=0) == sampling_seed(
        1, PromptId(0, 0), sample=0, attempt=0
    )


def test_seeds_of_named_runs_do_not_depend_on_the_order_of_their_requests() -> None:
    asked = [(run, ids) for run in ("0", "1") for ids in ([5], [5, 6], [5], [0, 5])]  # [5] twice

    def seeds(order: list[tuple[str, list[int]]], attempt: int = 0) -> dict[tuple[str, str], list[int]]:
        episode, found = Episode(Prompt(PromptId(0, 1)), attempt, 0, seed=3), defaultdict(list)
        for run, ids in order:
            found[run, str(ids)].append(episode.next_sample(ModelRequest(ids, seed_key=run))[1])
        return found

    first = seeds(asked)
    assert first == seeds(list(reversed(asked)))
    flat = [seed for values in first.values() for seed in values]
    assert len(set(flat)) == len(flat) == 8
    assert set(flat).isdisjoint(seed for values in seeds(asked, attempt=1).values() for seed in values)


def test_rewards_and_metrics_are_float32_whatever_a_workflow_makes_them() -> None:
    """A score may be the int 1 in one trajectory and 0.5 in another."""
    given = waiting_trajectory(0, 3)
    for rewards, scores in ((1, True), (0.5, 2)):
        given["rewards"], given["score"] = torch.tensor([rewards]), torch.tensor([scores])
        found = check_trajectory(given, 3)
        assert [found[key].dtype for key in ("rewards", "score")] == [torch.float32] * 2
        assert [found[key].tolist() for key in ("rewards", "score")] == [[rewards], [scores]]
        assert given["score"].dtype != torch.float32, "the workflow's own is as it was"

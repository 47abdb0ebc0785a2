"""Batches and their split over ranks."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from testing_workflows import waiting_trajectory

from arealite.api.io_struct import ModelRequest, PromptId
from arealite.rollout.prompts import Episode, Prompt, sampling_seed
from arealite.rollout.trajectory import assemble_batch, check_trajectory, deal_groups, packed_alone, split_batch
from arealite.utils.packed import head_of, join, layout_of, longest_row, unpack
from arealite.utils.tensors import ABSENT, concat_padded_tensors, trimmed_rows


def group(index: int, num_samples: int, length: int) -> TensorDict:
    return concat_padded_tensors([waiting_trajectory(index, 0, length) for _ in range(num_samples)])


def test_a_batch_numbers_its_episodes() -> None:
    batch = assemble_batch([group(7, 2, 3), group(8, 1, 5), group(9, 3, 2)])
    assert batch["group_index"].tolist() == [0, 0, 1, 2, 2, 2]
    assert batch["input_ids"][:, 0].tolist() == [7, 7, 8, 9, 9, 9]
    assert batch["attention_mask"].sum(1).tolist() == [3, 3, 5, 2, 2, 2]
    assert batch["versions"][0].tolist() == [-1, 0, 0, -1, -1]


def shares_of(trajectories: list[TensorDict], num_shares: int, num_minibatches: int = 1) -> list[TensorDict]:
    """Return the shares as their ranks restore them from the bytes that travel."""
    shares = split_batch(trajectories, num_shares, num_minibatches)
    return [unpack(join(pickle.loads(pickle.dumps(share)))) for share in shares]


def shares_of_a_whole(trajectories: list[TensorDict], num_shares: int, num_minibatches: int) -> list[TensorDict]:
    """Return the rows of each share of a batch that is padded to its longest row first."""
    batch = assemble_batch(trajectories)
    rewards = [one["rewards"].tolist() for one in trajectories]
    lengths = [int(one["attention_mask"].sum()) for one in trajectories]
    have_spread = [len(set(each)) > 1 for each in rewards]
    shares = deal_groups(lengths, have_spread, num_shares, num_minibatches)
    are_in = [torch.isin(batch["group_index"], torch.tensor(groups, dtype=torch.int64)) for groups in shares]
    return [trimmed_rows(batch, is_in_B.nonzero()[:, 0].tolist()) for is_in_B in are_in]


@st.composite
def groups_of_rows(draw: st.DrawFn) -> list[TensorDict]:
    """Draw trajectories of one workflow, with the keys that only some workflows have."""
    kinds = draw(st.sets(st.sampled_from(["images", "kept", "turn_rewards", "sample_index", "vector", "half"])))
    generator, groups = torch.Generator().manual_seed(draw(st.integers(0, 2**20))), []
    for lengths in draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=7)):
        width = max(lengths) + draw(st.sampled_from([0, 0, 0, 2]))  # a workflow may pad more than it must
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        numbers = torch.randint(1, 50, mask.shape, generator=generator)
        one = {"input_ids": numbers, "logprobs": -numbers / 7, "versions": numbers, "loss_mask": mask.int()}
        one = {key: value.where(mask, ABSENT.get(key, 0)) for key, value in one.items()} | {"attention_mask": mask}
        one["rewards"] = torch.tensor([float(draw(st.integers(0, 1))) for _ in lengths])
        if "images" in kinds:
            grids = [
                [(1, draw(st.integers(1, 2)), 2) for _ in range(draw(st.integers(0, min(2, length - 1))))]
                for length in lengths
            ]
            one |= images_of(grids, generator)
        if "kept" in kinds:
            counts = torch.randint(0, 3, mask.shape, generator=generator).where(mask, 0)
            real = torch.arange(max(1, int(counts.sum(1).max()))) < counts.sum(1)[:, None]
            one |= {
                "kept_counts": counts,
                "kept_ids": torch.randint(1, 9, real.shape, generator=generator).where(real, 0),
            }
        if "turn_rewards" in kinds:
            one["turn_rewards"] = (numbers / 3).where(mask, 0.0)
        if "sample_index" in kinds:
            one["sample_index"] = torch.arange(len(lengths))
        if "vector" in kinds:
            one["vector"] = torch.randn(len(lengths), 12, generator=generator)
        if "half" in kinds:
            one["half"] = (numbers / 3).to(torch.bfloat16).where(mask, 0.0)
        groups.append(TensorDict(one, batch_size=[len(lengths)]))
    return groups


def images_of(grids: list[list[tuple[int, int, int]]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the grids and patches of rows, padded to the row with the most."""
    num_images, num_patches = max(map(len, grids)), [sum(math.prod(grid) for grid in row) for row in grids]
    padded = torch.tensor([[*row, *[(0, 0, 0)] * (num_images - len(row))] for row in grids], dtype=torch.int64)
    real = torch.arange(max(num_patches)) < torch.tensor(num_patches)[:, None]
    patches = torch.randn(*real.shape, 3, generator=generator)
    return {
        "image_grid_thw": padded.view(len(grids), num_images, 3),
        "pixel_values": patches.where(real[..., None], 0.0),
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().tobytes()


@given(groups_of_rows(), st.integers(2, 5), st.integers(1, 3))
def test_shares_are_those_of_the_padded_batch(groups: list[TensorDict], num_shares: int, num_minibatches: int) -> None:
    """To the last bit, with their rows in order and their padding, though the whole batch never exists."""
    expected = shares_of_a_whole(groups, num_shares, num_minibatches)
    for share, whole in zip(shares_of(groups, num_shares, num_minibatches), expected, strict=True):
        assert list(share.keys()) == list(whole.keys()) and share.batch_size == whole.batch_size
        for key in list(share.keys()):
            assert share[key].dtype == whole[key].dtype and share[key].shape == whole[key].shape, key
            assert bytes_of(share[key]) == bytes_of(whole[key]), key


@given(groups_of_rows())
def test_groups_packed_apart_are_those_of_the_batch(groups: list[TensorDict]) -> None:
    """Also with a key that has the width of some groups."""
    for one in groups:
        one["mark"] = torch.arange(4.0).expand(len(one), 4)
    layout = layout_of(groups)
    head = head_of(layout, map(longest_row, groups))
    pieces = [[packed_alone(one, keys) for one in groups] for keys in (["input_ids"], list(groups[0].keys()))]
    names = [["input_ids", "attention_mask"], list(groups[0].keys())]
    (expected,) = shares_of(groups, 1)
    for keys, own in zip(names, pieces):
        found = unpack(join([{key: head[key] for key in keys}, *own]))
        for key in keys:
            assert bytes_of(found[key]) == bytes_of(expected[key]), key


def test_padding_of_a_batch_does_not_travel() -> None:
    groups = [group(index, 2, length) for index, length in enumerate([1000, 2, 2, 2])]
    first, second = (len(pickle.dumps(share)) for share in split_batch(groups, 2))
    assert second < 6_000 < first, "the share without the long row"


def test_a_key_as_wide_as_the_batch_is_no_key_of_tokens() -> None:
    groups = [group(index, 1, length) for index, length in enumerate([4, 2, 3])]
    for one in groups:
        one["vector"] = torch.arange(4.0)[None]
    second, first = shares_of(groups, 2)
    assert first["vector"].tolist() == [[0, 1, 2, 3]] and second["vector"].tolist() == [[0, 1, 2, 3]] * 2
    assert first["input_ids"].shape == (1, 5) and second["input_ids"].shape == (2, 3)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(2, 30)), min_size=1, max_size=12), shares=st.integers(1, 5)
)
def test_a_split_keeps_groups_whole_and_loses_nothing(shapes: list[tuple[int, int]], shares: int) -> None:
    groups = [group(index, *shape) for index, shape in enumerate(shapes)]
    batch, parts = assemble_batch(groups), shares_of(groups, shares)
    assert len(parts) == shares
    found = [set(part["group_index"].tolist()) for part in parts]
    assert sum(len(one) for one in found) == len(set().union(*found)) == len(shapes)
    assert all(part["group_index"].tolist() == sorted(part["group_index"].tolist()) for part in parts)
    joined = concat_padded_tensors(parts)
    assert sorted(joined["input_ids"].tolist()) == sorted(batch["input_ids"].tolist())
    assert all(part["versions"].shape[1] == max([1, *part["attention_mask"].sum(1).tolist()]) for part in parts)


def dealt(lengths: list[int], num_shares: int, num_minibatches: int = 1) -> list[list[int]]:
    return deal_groups(lengths, [False] * len(lengths), num_shares, num_minibatches)


@given(sizes=st.lists(st.integers(2, 100), min_size=1, max_size=30), shares=st.integers(1, 8))
def test_shares_have_about_equal_tokens(sizes: list[int], shares: int) -> None:
    loads = [sum(sizes[group] for group in groups) for groups in dealt(sizes, shares)]
    assert max(loads) <= sum(sizes) / shares + max(sizes)


def test_a_split_by_hand() -> None:
    # 5 | 4, then 4 | 4 + 4 > 5, so 2 goes beside the 5; the first share is the one with the most
    assert dealt([5, 2, 4, 4], 2) == [[2, 3], [0, 1]]
    assert dealt([5, 2], 3) == [[0], [1], []]


def test_every_minibatch_is_dealt_over_the_shares_by_hand() -> None:
    # minibatch 0 has groups of 9, 2 and 7 tokens: 9 | 7 + 2; minibatch 1 of 9, 3 and 6: 9 | 6 + 3
    assert dealt([9, 9, 2, 3, 7, 6], 2, 2) == [[0, 1], [2, 3, 4, 5]]
    assert dealt([9, 8, 2, 3], 2, 2) == [[0, 3], [1, 2]], "9 | 2, then the 8 to the second, which has fewer"


def test_groups_with_and_without_spread_are_dealt_apart_by_hand() -> None:
    # groups 1, 2 and 3 have spread: 14 + 4 | 16 tokens; of the others 6 | 18, the most to the second, which has fewer
    groups = [group(index, 2, size) for index, size in enumerate([9, 8, 7, 2, 3])]
    for index in (1, 2, 3):
        groups[index]["rewards"][0] += 1
    assert [share["group_index"].unique().tolist() for share in shares_of(groups, 2)] == [[2, 3, 4], [0, 1]]
    assert dealt([18, 16, 14, 4, 6], 2) == [[1, 2], [0, 3, 4]], "without it"


def lognormal_lengths(seed: int, num_groups: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (7 * torch.randn(num_groups, generator=generator).mul(0.3).exp()).mul(8).int().add(2).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_dead", "bound"), [(0, 0.97), (30, 0.95)])
def test_ranks_hardly_wait_for_each_other_in_a_minibatch(seed: int, num_dead: int, bound: float) -> None:
    """The share of useful time: tokens over ranks times those of the rank with the most, minibatch by minibatch."""
    lengths = lognormal_lengths(seed, 64)
    dead = set(torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:num_dead].tolist())
    live = [group not in dead for group in range(64)]

    def useful(num_minibatches: int, are_trained: list[bool]) -> float:
        trained = [length * is_trained for length, is_trained in zip(lengths, are_trained)]
        shares, waited = deal_groups(lengths, live, 2, num_minibatches), 0
        for index in range(4):
            waited += max(sum(trained[group] for group in groups if group % 4 == index) for groups in shares)
        return sum(trained) / (2 * waited)

    assert useful(4, live) > bound > useful(1, live)
    assert useful(4, [True] * 64) > bound, "nor where groups without spread are trained on"


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

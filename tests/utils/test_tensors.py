import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from arealite.utils.tensors import (
    concat_padded_tensors,
    count_micro_batches,
    pack_rows,
    split_balanced,
    split_rows,
    unit_lengths,
    unpack_rows,
)

LENGTHS = st.lists(st.integers(1, 40), max_size=20)


def rows(ids: list[list[int]], rewards: list[float]) -> TensorDict:
    input_ids = torch.tensor(ids)
    return TensorDict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids, dtype=torch.bool),
            "versions": torch.zeros_like(input_ids),
            "rewards": torch.tensor(rewards),
        },
        batch_size=[len(ids)],
    )


def test_shorter_rows_are_padded_on_the_right_and_read_as_absent() -> None:
    batch = concat_padded_tensors([rows([[1, 2, 3]], [0.5]), rows([[4], [5]], [1.0, 2.0])], pad_value=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9], [5, 9, 9]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert batch["versions"].tolist() == [[0, 0, 0], [0, -1, -1], [0, -1, -1]]
    assert batch["rewards"].tolist() == [0.5, 1.0, 2.0]
    assert batch.batch_size == (3,)


def test_nothing_and_different_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one entry"):
        concat_padded_tensors([])
    with pytest.raises(ValueError, match=r"same keys.*'rewards'.* in entry 1"):
        concat_padded_tensors([rows([[1]], [0.0]), rows([[1]], [0.0]).exclude("versions")])


def padded(lengths: list[int]) -> TensorDict:
    """Rows of distinct numbers."""
    longest = max(lengths, default=0)
    attention_mask = torch.arange(longest)[None] < torch.tensor(lengths, dtype=torch.long)[:, None]
    values = torch.arange(1, len(lengths) * longest + 1).reshape(len(lengths), longest) * attention_mask
    return TensorDict(
        {"input_ids": values, "attention_mask": attention_mask, "rewards": torch.arange(len(lengths)) / 2},
        batch_size=[len(lengths)],
    )


def test_packing_three_rows_by_hand() -> None:
    micro_batch = pack_rows(padded([2, 3, 1]), [0, 2])
    packed = micro_batch.packed
    assert packed["input_ids"].tolist() == [1, 2, 7]
    assert packed["cu_seqlens"].tolist() == [0, 2, 3] and packed["cu_seqlens"].dtype == torch.int32
    assert packed["position_ids"].tolist() == [0, 1, 0]
    assert packed["segment_ids"].tolist() == [0, 0, 1]
    assert packed["rewards"].tolist() == [0.0, 1.0]
    assert packed["rewards"][packed["segment_ids"]].tolist() == [0.0, 0.0, 1.0]
    assert "attention_mask" not in packed and micro_batch.num_tokens == 3


def test_rows_padded_on_the_left_or_inside_are_packed_by_their_mask() -> None:
    batch = TensorDict(
        {"input_ids": torch.tensor([[0, 1, 2], [3, 0, 4]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 0, 1]])},
        batch_size=[2],
    )
    packed = pack_rows(batch, [0, 1]).packed
    assert packed["input_ids"].tolist() == [1, 2, 3, 4]
    assert packed["position_ids"].tolist() == [0, 1, 0, 1]


@given(lengths=LENGTHS, num_groups=st.integers(1, 30), max_tokens=st.none() | st.integers(1, 60))
def test_packing_any_split_and_unpacking_is_the_identity(
    lengths: list[int], num_groups: int, max_tokens: int | None
) -> None:
    batch = padded(lengths)
    groups = split_balanced(lengths, num_groups, max_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    micro_batches = [pack_rows(batch, group) for group in groups]
    assert sum(micro_batch.num_tokens for micro_batch in micro_batches) == sum(lengths)
    restored = unpack_rows([micro_batch.packed["input_ids"] for micro_batch in micro_batches], micro_batches, batch)
    assert torch.equal(restored, batch["input_ids"])


@given(lengths=LENGTHS, n_mbs=st.integers(1, 8), max_tokens=st.integers(1, 60), extra=st.integers(0, 6))
def test_micro_batches_fit_also_when_another_rank_needs_more_of_them(
    lengths: list[int], n_mbs: int, max_tokens: int, extra: int
) -> None:
    count = count_micro_batches(lengths, n_mbs, max_tokens)
    assert count >= min(n_mbs, len(lengths))
    for group in split_balanced(lengths, count + extra, max_tokens) if count + extra else []:
        assert sum(lengths[i] for i in group) <= max_tokens or len(group) == 1


def test_best_fit_packs_what_even_groups_can_not() -> None:
    lengths = [6, 5, 4, 3, 2]  # 6 + 4 and 5 + 3 + 2; even groups are 6 + 3 + 2 and 5 + 4
    assert count_micro_batches(lengths, 1, 10) == 2
    assert split_balanced(lengths, 2, 10) == [[0, 2], [1, 3, 4]]
    assert [len(group) for group in split_balanced(lengths, 3, 10)] == [1, 2, 2], "even where they fit"


@given(
    lengths=st.lists(st.integers(1, 20), max_size=24),
    rows_per_unit=st.integers(1, 3),
    num_groups=st.integers(1, 9),
    max_tokens=st.none() | st.integers(1, 60),
)
def test_units_are_never_torn_apart(
    lengths: list[int], rows_per_unit: int, num_groups: int, max_tokens: int | None
) -> None:
    lengths = lengths[: len(lengths) // rows_per_unit * rows_per_unit]
    mask = padded(lengths)["attention_mask"]
    groups = split_rows(unit_lengths(mask, rows_per_unit), num_groups, max_tokens, rows_per_unit=rows_per_unit)
    assert sorted(row for group in groups for row in group) == [*range(len(lengths))]
    for group in groups:
        units = [group[start : start + rows_per_unit] for start in range(0, len(group), rows_per_unit)]
        assert all(unit == [*range(unit[0], unit[0] + rows_per_unit)] for unit in units)
        assert all(unit[0] % rows_per_unit == 0 for unit in units)


def test_without_a_limit_the_number_is_the_minimum_and_at_most_the_rows() -> None:
    assert count_micro_batches([5, 5, 5], 2) == 2
    assert count_micro_batches([5, 5, 5], 7) == 3
    assert count_micro_batches([], 4) == 0


def test_a_key_as_wide_as_the_rows_is_per_token_and_others_are_per_row() -> None:
    batch = padded([2, 3])
    batch["advantages"] = torch.zeros(2, 3)
    batch["features"] = torch.arange(96).reshape(2, 6, 8)
    packed = pack_rows(batch, [1, 0]).packed
    assert packed["advantages"].shape == (5,)
    assert torch.equal(packed["features"], batch["features"].flip(0))


def test_patches_stay_with_their_images() -> None:
    """Also where a row has as many images as the batch has columns."""
    batch = padded([2, 3])
    batch["image_grid_thw"] = torch.tensor([[[1, 2, 1], [1, 1, 1], [0, 0, 0]], [[1, 2, 2], [0, 0, 0], [0, 0, 0]]])
    batch["pixel_values"] = torch.arange(20).reshape(2, 5, 2)
    packed = pack_rows(batch, [1, 0]).packed
    assert packed["pixel_values"][:, 0].tolist() == [10, 12, 14, 16, 0, 2, 4]
    assert torch.equal(packed["image_grid_thw"], batch["image_grid_thw"].flip(0))
    wider = batch.clone().set("pixel_values", torch.zeros(2, 9, 2, dtype=torch.int64))
    joined = pack_rows(concat_padded_tensors([batch, wider]), [0, 1]).packed
    assert joined["pixel_values"][:, 0].tolist() == [0, 2, 4, 10, 12, 14, 16]


def with_kept(batch: TensorDict, counts: list[list[int]], width: int) -> TensorDict:
    """Add kept sets: the ids of a token are its own number and what follows."""
    counts_BS = torch.zeros(batch["input_ids"].shape, dtype=torch.int32)
    ids_BL = torch.zeros(len(counts), width, dtype=torch.int32)
    for row, of_row in enumerate(counts):
        counts_BS[row, : len(of_row)] = torch.tensor(of_row)
        ids = [int(batch["input_ids"][row, index]) + i for index, count in enumerate(of_row) for i in range(count)]
        ids_BL[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    batch["kept_counts"], batch["kept_ids"] = counts_BS, ids_BL
    return batch


def test_kept_sets_stay_with_their_tokens() -> None:
    """Also where a row has as many ids as the batch has columns."""
    batch = with_kept(padded([2, 3]), [[0, 3], [0, 1, 2]], 3)
    assert batch["kept_ids"].shape == batch["input_ids"].shape
    other = with_kept(padded([4]), [[0, 2, 0, 3]], 7)
    joined = concat_padded_tensors([batch, other])
    assert joined["kept_ids"].shape == (3, 7) and joined["input_ids"].shape == (3, 4)
    for whole, order, ids in ((batch, [1, 0], [5, 6, 7, 2, 3, 4]), (joined, [2, 1], [2, 3, 4, 5, 6, 5, 6, 7])):
        packed = pack_rows(whole, order).packed
        assert packed["kept_ids"].tolist() == ids
        assert packed["kept_counts"].sum() == len(ids) and packed["kept_counts"].shape == packed["input_ids"].shape
    empty = pack_rows(joined, []).packed
    assert empty["kept_ids"].shape == empty["kept_counts"].shape == (0,)


@given(st.data())
def test_packing_any_split_keeps_every_kept_set(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    counts = [data.draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)) for length in lengths]
    batch = with_kept(padded(lengths), counts, max(map(sum, counts)) + data.draw(st.integers(0, 4)))
    groups = split_balanced(lengths, data.draw(st.integers(1, 4)))
    found = {}
    for group in groups:
        packed = pack_rows(batch, group).packed
        parts = packed["kept_ids"].split(packed["kept_counts"].tolist())
        found |= dict(zip(packed["input_ids"].tolist(), [part.tolist() for part in parts], strict=True))
    numbers = [int(batch["input_ids"][row, index]) for row, of_row in enumerate(counts) for index in range(len(of_row))]
    flat = [count for of_row in counts for count in of_row]
    assert found == {number: list(range(number, number + count)) for number, count in zip(numbers, flat, strict=True)}

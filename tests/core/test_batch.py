"""Pieces: what a batch becomes on its way through the object store."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from arealite.core.batch import Column, Pieces, RemoteBatch, cut, joined, restored
from arealite.utils.packed import pack, unpack

TOKENS = ("input_ids", "attention_mask", "kept_ids", "kept_counts")
RESTS = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def part_of(lengths: list[int], *, width: int = 0, kept: bool = False) -> TensorDict:
    """Return rows of these lengths, with numbers that tell entries apart."""
    width = max([width, *lengths, 1])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape)
    part = {
        "attention_mask": mask,
        "input_ids": ids.where(mask, 0),
        "versions": ids.where(mask, -1),
        "logprobs": (-ids / 7.0).where(mask, 0.0),
        "values": (ids / 3.0).to(torch.bfloat16).where(mask, 0.0),
        "rewards": torch.tensor([float(length) for length in lengths]),
        "group_index": torch.arange(len(lengths)),
    }
    if kept:  # two ids for each token
        part["kept_counts"] = torch.full(mask.shape, 2).where(mask, 0)
        real = torch.arange(2 * width) < 2 * torch.tensor(lengths)[:, None]
        part["kept_ids"] = torch.arange(real.numel()).view(real.shape).where(real, 0)
    return TensorDict(part, batch_size=[len(lengths)])


def assert_equal(left: TensorDict, right: TensorDict) -> None:
    assert set(left.keys()) == set(right.keys())
    for key in sorted(left.keys()):
        assert left[key].dtype == right[key].dtype, key
        assert torch.equal(left[key], right[key]), key


@given(RESTS, st.integers(0, 9), st.booleans())
def test_what_is_restored_is_what_was_sent(lengths: list[int], width: int, kept: bool) -> None:
    part = part_of(lengths, width=width, kept=kept)
    tokens = [key for key in TOKENS if key in part]
    rest = [key for key in sorted(part.keys()) if key not in tokens]
    assert_equal(unpack(pack(part, tokens) | pack(part, rest)), part)


def test_padding_does_not_travel() -> None:
    piece = pack(part_of([1, 3], width=100), ["input_ids", "logprobs", "rewards"])
    assert {key: array.values.shape for key, array in piece.items()} == {
        "input_ids": (4,),
        "logprobs": (4,),
        "rewards": (2,),
    }


def test_what_is_restored_is_no_part_of_the_store() -> None:
    part = part_of([2, 1])
    piece = pack(part, part.keys())
    for array in piece.values():
        array.values.flags.writeable = False  # as arrays of the store are
    restored = unpack(piece)
    restored["input_ids"] += 1
    assert_equal(unpack(piece), part)


@given(RESTS, RESTS)
def test_a_column_of_joined_parts_is_cut_into_those_of_the_parts(first: list[int], second: list[int]) -> None:
    parts = [part_of(first, kept=True), part_of(second, kept=True)]
    batch = joined([one.clone() for one in parts])
    batch["doubled"] = 2 * batch["logprobs"]
    batch["per_row"] = 3 * batch["rewards"]
    for part, of_part in zip(parts, cut(batch, parts, ["doubled", "per_row", "kept_ids"])):
        assert torch.equal(of_part["doubled"], 2 * part["logprobs"])
        assert torch.equal(of_part["per_row"], 3 * part["rewards"])
        piece = pack(of_part, ["kept_ids"]) | pack(part, ["attention_mask", "kept_counts"])
        num_kept = part["kept_ids"].shape[1]
        assert torch.equal(unpack(piece)["kept_ids"][:, :num_kept], part["kept_ids"])
        assert (unpack(piece)["kept_ids"][:, num_kept:] == 0).all()


def test_selected_columns_are_restored_from_the_pieces_where_they_lie() -> None:
    """Under the names of the batch, with what tells which entries are real, and without what its call did not make."""
    parts = [part_of([2, 1], kept=True), part_of([3], kept=True)]
    tokens, rest = (Pieces([pack(part, keys) for part in parts]) for keys in (TOKENS, ["values", "logprobs"]))
    batch, outcomes = RemoteBatch([[0, 1], [2]]), Future[list[SimpleNamespace]]()
    for name in TOKENS:
        batch[name] = Column(tokens, name)
    batch["old_values"] = Column(rest, "values")
    batch["absent"] = Column(rest, "absent", outcomes)
    outcomes.set_result([SimpleNamespace(made=("values",))])
    selected = batch.select(["old_values", "kept_ids", "absent", "unknown"])
    assert [*selected] == ["attention_mask", "old_values", "kept_ids", "kept_counts", "absent"]
    layout = selected.layout()
    names = {name: name for name in ("attention_mask", "kept_ids", "kept_counts")}
    assert layout == {tokens: names, rest: {"old_values": "values"}}
    for part, found in zip(parts, restored(layout.values(), zip(tokens.result(), rest.result())), strict=True):
        assert_equal(found, part.select(*names).set("old_values", part["values"]))
    assert [*batch.select()] == [*batch] and batch.select().num_parts == 2


def test_a_remote_batch_names_what_it_lacks_and_takes_only_columns() -> None:
    batch = RemoteBatch([[0, 1]])
    batch["values"] = Column(Pieces(), "values")
    assert "values" in batch and batch.num_parts == 1
    with pytest.raises(KeyError, match=r"a batch must have 'returns': got \['values'\]"):
        batch["returns"]
    with pytest.raises(TypeError, match="must come from a call of an engine: got ndarray for 'mine'"):
        batch["mine"] = np.zeros(3)  # type: ignore[assignment]

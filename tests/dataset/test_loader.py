import functools
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from arealite.api.io_struct import PromptId
from arealite.dataset.loader import PromptLoader, sft_batches, sft_collate


def dataset(size: int) -> list[dict[str, int]]:
    return [{"value": 10 * index} for index in range(size)]


def ids(batches) -> list[list[tuple[int, int]]]:
    return [[(row["prompt_id"].epoch, row["prompt_id"].index) for row in batch] for batch in batches]


def test_rows_carry_their_epoch_and_index() -> None:
    loader = PromptLoader(dataset(5), 2, shuffle=False)
    assert ids(itertools.islice(loader, 5)) == [
        [(0, 0), (0, 1)],
        [(0, 2), (0, 3)],
        [(1, 0), (1, 1)],
        [(1, 2), (1, 3)],
        [(2, 0), (2, 1)],
    ]
    assert len(loader) == 2
    assert next(iter(PromptLoader(dataset(3), 1, shuffle=False))) == [{"value": 0, "prompt_id": PromptId(0, 0)}]


def test_the_rest_of_an_epoch_is_a_smaller_batch_without_drop_last() -> None:
    loader = PromptLoader(dataset(5), 2, shuffle=False, drop_last=False)
    assert ids(itertools.islice(loader, 4)) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)], [(1, 0), (1, 1)]]
    assert len(loader) == 3


@given(st.integers(1, 30), st.data(), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_resumed_loader_goes_on_as_the_original(size, data, seed, shuffle, drop_last) -> None:
    batch_size = data.draw(st.integers(1, size))
    passed = data.draw(st.integers(0, 20))

    def make() -> PromptLoader:
        return PromptLoader(dataset(size), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    original = make()
    stream = iter(original)
    for _ in range(passed):
        next(stream)
    resumed = make()
    resumed.load_state_dict(original.state_dict())
    assert ids(itertools.islice(resumed, 10)) == ids(itertools.islice(stream, 10))


@given(st.integers(1, 40), st.data(), st.integers(0, 3))
def test_an_epoch_meets_every_prompt_once(size, data, seed) -> None:
    loader = PromptLoader(dataset(size), data.draw(st.integers(1, size)), seed=seed, drop_last=False)
    for epoch in range(3):
        rows = [row for batch in itertools.islice(loader, len(loader)) for row in batch]
        assert sorted(row["prompt_id"].index for row in rows) == list(range(size))
        assert {row["prompt_id"].epoch for row in rows} == {epoch}
        assert all(row["value"] == 10 * row["prompt_id"].index for row in rows)


def test_a_row_can_be_fetched_by_its_name() -> None:
    loader = PromptLoader(dataset(5), 2, seed=3)
    cursor, passed = loader.state_dict(), next(iter(loader))
    assert [PromptLoader(dataset(5), 2, seed=3).fetch(row["prompt_id"]) for row in passed] == passed
    loader.load_state_dict(cursor)
    loader.fetch(PromptId(7, 4))
    assert loader.state_dict() == cursor, "the cursor stays"
    with pytest.raises(ValueError, match="got -1-3, which was submitted without a name"):
        loader.fetch(PromptId(-1, 3))


def test_iterators_share_one_cursor() -> None:
    loader = PromptLoader(dataset(6), 2, shuffle=False)
    assert ids([next(iter(loader)), next(iter(loader)), next(iter(loader))]) == [
        [(0, 0), (0, 1)],
        [(0, 2), (0, 3)],
        [(0, 4), (0, 5)],
    ]


def test_what_can_not_be_is_refused() -> None:
    for batch_size in (0, 4):
        with pytest.raises(ValueError, match=r"batch_size must lie in 1\.\.3"):
            PromptLoader(dataset(3), batch_size)
    state = PromptLoader(dataset(3), 1, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed must be 1"):
        PromptLoader(dataset(3), 1, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="dataset_size must be 3"):
        PromptLoader(dataset(4), 1, seed=1).load_state_dict(state)
    for change in ({"batch_size": 3}, {"shuffle": False}, {"drop_last": False}):
        (key,) = change
        with pytest.raises(ValueError, match=f"{key} must be .*, as when the cursor was saved: got"):
            PromptLoader(dataset(3), **{"batch_size": 1, "seed": 1, **change}).load_state_dict(state)


def warnings_on_resume(state: dict[str, int], rows: Any, caplog: pytest.LogCaptureFixture) -> int:
    caplog.clear()
    loader = PromptLoader(rows, 1)
    loader.load_state_dict(state)
    assert loader.state_dict()["position"] == state["position"]
    return sum("dataset_checksum should be" in text for text in caplog.messages)


def test_resuming_with_other_rows_warns(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{index}?", "tokens": [index], "image": object()} for index in range(3)]
    loader = PromptLoader(rows, 1)
    next(iter(loader))
    state = loader.state_dict()
    assert warnings_on_resume(state, [{**row, "image": object()} for row in rows], caplog) == 0
    for others in ([*rows[:2], {**rows[2], "question": "5?"}], rows[::-1]):
        assert warnings_on_resume(state, others, caplog) == 1
    del state["dataset_checksum"]  # of a release that had none
    assert warnings_on_resume(state, rows[::-1], caplog) == 0


@pytest.mark.parametrize("plain", [2**70, "\ud800", {(1, "\udfff"): [2**64]}, [None, 2.5, b"bytes"]])
def test_any_row_has_a_checksum(plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    def rows(value: Any) -> list[dict[str, Any]]:
        return [{"value": value, "other": object(), "by_tuple": {(1, 2): 2**80}}]

    state = PromptLoader(rows(plain), 1).state_dict()
    assert warnings_on_resume(state, rows(plain), caplog) == 0
    assert warnings_on_resume(state, rows([plain]), caplog) == 1


def test_a_checksum_reads_what_is_stored_not_what_a_transform_returns() -> None:
    datasets = pytest.importorskip("datasets")
    stored = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": [1, 2]})

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("an image would be decoded here")

    first, again = (PromptLoader(stored.with_transform(transform), 1).state_dict() for _ in range(2))
    assert first == again == PromptLoader(stored, 1).state_dict()


def test_a_last_batch_of_fewer_rows_than_ranks_leaves_some_without() -> None:
    rows = [{"input_ids": [5, index], "loss_mask": [0, 1]} for index in range(5)]
    shares = []
    for rank in range(2):
        loader = PromptLoader(rows, 4, shuffle=False, drop_last=False)
        shares.append(list(itertools.islice(sft_batches(loader, 0, rank, 2), 3)))
    assert [[batch.batch_size[0] for batch in share] for share in shares] == [[2, 1, 2], [2, 0, 2]]
    assert shares[0][1]["input_ids"].tolist() == [[5, 4]]
    assert set(shares[1][1].keys()) == {"input_ids", "loss_mask", "attention_mask"}


def shares_of(rows: list[dict[str, Any]], make: Any, *, batch_size: int, num_ranks: int) -> list[TensorDict]:
    loaders = [PromptLoader(rows, batch_size, shuffle=False) for _ in range(num_ranks)]
    return [next(make(loader, 0, rank, num_ranks)) for rank, loader in enumerate(loaders)]


def row_of(number: int, length: int) -> dict[str, list[int]]:
    return {"input_ids": [number] * length, "loss_mask": [1] * length}


@pytest.mark.parametrize("seed", range(3))
def test_ranks_get_about_equal_tokens(seed: int) -> None:
    """The share of useful time: tokens over ranks times those of the rank with the most."""
    draw = random.Random(seed)
    lengths = [min(4096, 2 + int(draw.lognormvariate(6, 0.8))) for _ in range(128)]
    rows = [row_of(number, length) for number, length in enumerate(lengths)]
    shares = shares_of(rows, sft_batches, batch_size=128, num_ranks=8)
    loads = [int(share["attention_mask"].sum()) for share in shares]
    assert sum(loads) == sum(lengths) >= 0.95 * 8 * max(loads)
    dealt = [share["input_ids"][:, 0].tolist() for share in shares]
    assert sorted(number for numbers in dealt for number in numbers) == list(range(128))


def test_the_ranks_of_a_block_get_the_same_rows() -> None:
    rows = [row_of(number, 2 + number) for number in range(8)]
    by_block = shares_of(rows, functools.partial(sft_batches, parallel="d2p2t2"), batch_size=8, num_ranks=8)
    whole = shares_of(rows, sft_batches, batch_size=8, num_ranks=2)
    for rank, share in enumerate(by_block):
        assert share["input_ids"].tolist() == whole[rank // 2 % 2]["input_ids"].tolist()


def test_pairs_are_dealt_by_the_tokens_of_both_answers() -> None:
    sizes = [(2, 7), (8, 2), (1, 1), (3, 1)]  # 9, 10, 2 and 4 tokens: 10 + 2 | 9 + 4
    rows = [{"pair": [row_of(number, length) for length in both]} for number, both in enumerate(sizes)]
    shares = shares_of(rows, sft_batches, batch_size=4, num_ranks=2)
    dealt = [list(zip(one["input_ids"][:, 0].tolist(), one["attention_mask"].sum(1).tolist())) for one in shares]
    assert dealt == [[(1, 8), (1, 2), (2, 1), (2, 1)], [(0, 2), (0, 7), (3, 3), (3, 1)]]


def test_collate_pads_on_the_right() -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}]
    batch = sft_collate(rows, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch.batch_size == (2,)


@pytest.mark.parametrize("value", [1.0, "1", 2**63])
def test_what_is_no_integer_is_not_collated(value: Any) -> None:
    with pytest.raises(ValueError, match="loss_mask of a row must be integers: got "):
        sft_collate([{"input_ids": [1], "loss_mask": [value]}])

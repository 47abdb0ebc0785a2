import pytest
import torch
from tensordict import TensorDict

from arealite.utils.tensors import concat_padded_tensors


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


def test_empty_batches_add_no_rows() -> None:
    batch = rows([[1, 2]], [0.5])
    assert concat_padded_tensors([batch[:0], batch, batch[:0]])["input_ids"].tolist() == [[1, 2]]


def test_different_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same keys.*'rewards'.* in entry 1"):
        concat_padded_tensors([rows([[1]], [0.0]), rows([[1]], [0.0]).exclude("versions")])


def test_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one entry"):
        concat_padded_tensors([])

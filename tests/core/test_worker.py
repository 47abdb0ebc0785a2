"""What a worker makes of the calls that it gets, without Ray around it."""

import json
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("ray")
from arealite.core.worker import Call, Worker, portable
from arealite.utils.packed import pack, unpack


class Engine:
    """Counts itself."""

    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1

    def count(self) -> int:
        return self.num_made


def test_a_role_whose_engine_is_made_once_more_has_the_new_one() -> None:
    worker = Worker.__new__(Worker)
    worker._engines = {}
    make = Call("actor.make", "actor", Engine, makes=True)
    engines = []
    for _ in range(2):
        assert worker._do(make, (), []).value is None
        engines.append(worker._engines["actor"])
    assert engines[0] is not engines[1] and worker._do(Call("actor.count", "actor", "count"), (), []).value == 2


def halve_long(engine: Engine, batch: TensorDict) -> None:
    """Write into a column of the batch, and into a part of another."""
    batch["rewards"] *= 0.5
    batch["advantages"][1, 0] = 7.0


@pytest.mark.parametrize("rows_of_parts", [[2], [1, 1]])
def test_what_a_function_writes_into_a_column_counts_as_made(rows_of_parts: list[int]) -> None:
    worker, keys = Worker.__new__(Worker), ("attention_mask", "rewards", "advantages", "values")
    worker._engines = {"actor": Engine()}
    whole = TensorDict(
        {
            "attention_mask": torch.ones(2, 3, dtype=torch.bool),
            "rewards": torch.tensor([1.0, 3.0]),
            "advantages": torch.zeros(2, 3),
            "values": torch.ones(2, 3),
        },
        batch_size=[2],
    )
    pieces = [pack(part, keys) for part in whole.split(rows_of_parts)]
    results: list[dict[str, Any]] = [{}] * len(pieces)
    call = Call("actor.halve_long", "actor", halve_long, layout=({key: key for key in keys},))
    outcome = worker._do(call, pieces, results)
    assert outcome.made == ("rewards", "advantages")
    parts = [unpack(pack(part, ["attention_mask"]) | one) for part, one in zip(whole.split(rows_of_parts), results)]
    assert torch.cat([part["rewards"] for part in parts]).tolist() == [0.5, 1.5]
    assert torch.cat([part["advantages"] for part in parts]).tolist() == [[0.0, 0.0, 0.0], [7.0, 0.0, 0.0]]


def score(engine: Engine, batch: TensorDict, *, how: str) -> torch.Tensor | None:
    if how == "adds it":
        batch["scores"] = batch["rewards"]
    return batch["rewards"] if how == "returns it" else None


@pytest.mark.parametrize("how", ["returns it", "adds it", "forgets it"])
@pytest.mark.parametrize("output", ["scores", "scores?"])
def test_the_output_of_a_call_must_be_made_unless_it_may_be_absent(output: str, how: str) -> None:
    worker, keys = Worker.__new__(Worker), ("attention_mask", "rewards")
    worker._engines = {"actor": Engine()}
    columns = {"attention_mask": torch.ones(2, 3, dtype=torch.bool), "rewards": torch.tensor([1.0, 3.0])}
    piece = pack(TensorDict(columns, batch_size=[2]), keys)
    layout = ({key: key for key in keys},)
    call = Call("actor.score", "actor", score, kwargs={"how": how}, output=output, layout=layout)
    if (output, how) == ("scores", "forgets it"):
        with pytest.raises(ValueError, match="score must return a tensor, scores: got NoneType"):
            worker._do(call, [piece], [{}])
    else:
        assert worker._do(call, [piece], [{}]).made == (() if how == "forgets it" else ("scores",))


class BadRow(Exception):
    """Can't be unpickled, as exceptions are made again of their `args`."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"row {row} is bad: {why}")


def test_an_error_that_can_not_be_passed_on_keeps_its_words_and_notes() -> None:
    error = BadRow(3, "no answer")
    error.add_note("on a rollout worker:\n  my_workflow.py:12")
    told = portable(error)
    assert str(told) == "BadRow: row 3 is bad: no answer"
    assert told.__notes__ == ["on a rollout worker:\n  my_workflow.py:12"]


def test_an_error_stays_agreed_on_if_its_pickle_drops_attributes() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    vars(raised.value)["is_agreed"] = True
    plain = portable(raised.value)
    assert vars(pickle.loads(pickle.dumps(plain)))["is_agreed"] and str(plain).startswith("JSONDecodeError: Expecting")
    assert portable(agreed := ValueError("no row")) is agreed

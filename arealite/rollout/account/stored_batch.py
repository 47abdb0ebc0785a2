"""Batches read back from the lines of `rollouts/step_<N>.jsonl`, bit for bit as they were handed out.

A line holds one row without its padding (batches that are read back are padded to their longest row, with zeros):
`more` has the keys beyond the usual ones, `dtypes` the types that are not the usual ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from arealite.rollout.trajectory import assemble_batch
from arealite.utils.files import iter_jsonl
from arealite.utils.tensors import concat_padded_tensors

_PER_TOKEN = ("input_ids", "loss_mask", "logprobs", "versions")
_DTYPES = {
    "input_ids": "int64",
    "attention_mask": "bool",
    "loss_mask": "int64",
    "logprobs": "float32",
    "versions": "int64",
    "rewards": "float32",
}
Line = Mapping[str, Any]


def columns_of(row: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a row of a trajectory as JSON values; `read_batches` inverts it."""
    is_real = row["attention_mask"].bool()
    dtypes = {key: str(row[key].dtype).removeprefix("torch.") for key in sorted(row)}
    return {
        **{key: row[key][is_real].tolist() for key in _PER_TOKEN},
        "reward": row["rewards"].item(),
        "more": {key: _real(row[key], is_real).tolist() for key in sorted(dtypes.keys() - _DTYPES.keys())},
        "dtypes": {key: dtype for key, dtype in dtypes.items() if dtype != _DTYPES.get(key)},
    }


def read_batches(path: Path) -> list[TensorDict]:
    """Return the batches of a file in the order in which they were handed out."""
    batches: list[list[list[TensorDict]]] = []
    for line in iter_jsonl(path):
        if line["batch"] == len(batches):
            batches.append([])
        if line["sample"] == 0:
            batches[-1].append([])
        batches[-1][-1].append(_row(line))
    return [assemble_batch([concat_padded_tensors(rows) for rows in episodes]) for episodes in batches]


def _row(line: Line) -> TensorDict:
    """Return the one row of a line as a trajectory."""
    values = {key: line[key] for key in _PER_TOKEN} | line["more"]
    values |= {"attention_mask": [1] * len(line["input_ids"]), "rewards": line["reward"]}
    dtypes = _DTYPES | line["dtypes"]
    row = {key: torch.tensor([value], dtype=getattr(torch, dtypes[key])) for key, value in values.items()}
    return TensorDict(row, batch_size=[1])


def _real(values: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Drop the padding of a key that has an entry per token."""
    return values[is_real] if values.shape[:1] == is_real.shape else values

"""Batches read back from the lines of `rollouts/step_<N>.jsonl`, equal to what was handed out, bit for bit.

A line holds the real tokens of one row. Every other key of a row is in `more`, and `dtypes` names those that are not
the usual ones. Numbers survive JSON exactly, as floats are written so that they read back the same. Padding is not
stored: what is read back is padded to its longest row, with zeros.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from arealite.rollout.trajectory import assemble_batch
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
    """Return what a line says of a row of a trajectory; `read_batches` turns it back."""
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
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
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
    """Leave the padding out of a key that has an entry per token."""
    return values[is_real] if values.shape[:1] == is_real.shape else values

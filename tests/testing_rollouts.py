"""Rows of rollout files, written by hand and read as a run's tools do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arealite.rollout.account.rollout_file import batch_files, read_rows, write_batch

_WHOLE = {"row": 0, "num_rows": 1, "sample": 0, "attempt": 0, "reward": 0.0, "server": ""}


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a name, such as `rollouts/step_3`."""
    return list(read_rows(path))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as the next batch of a name; what they lack is that of a single row."""
    whole = [_WHOLE | {key: value for key, value in row.items() if key != "trained_step"} for row in rows]
    step = path.name.removeprefix("step_")
    table = pa.Table.from_pylist(whole)
    write_batch(path / f"{len(batch_files(path))}.parquet", [table], int(step) if step.isdecimal() else None)


def edit_rows(path: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Replace the rows of the first batch of a name."""
    table = pq.read_table(file := path / "0.parquet", partitioning=None)
    pq.write_table(pa.Table.from_pylist(edit(table.to_pylist()), table.schema), file)

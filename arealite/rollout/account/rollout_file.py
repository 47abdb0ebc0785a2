"""The rollout files of a run: one Parquet file per batch, `rollouts/<name>/<K>.parquet`.

Invariant: a file is whole or absent. Rows have no padding. `sample` is the number of the run in its group, `row` and
`num_rows` the place in the episode, `segments` the given and sampled texts in order, `more` has further keys.
Episodes beyond `rollout.stored_share` lack tokens and texts; prompts and rewards are always complete. Image patches are
not stored: they are a thousand times the size of all else.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arealite.api.run_folder import numbered
from arealite.utils.files import reading, write_atomically

PER_TOKEN = ("input_ids", "loss_mask", "logprobs", "versions")
PER_TOKEN_OF_UPDATE = ("advantages", "logprob_gap", "log_ratio")
_OPTIONAL = ("segments", *PER_TOKEN)  # None in a row that is not stored whole
_ALWAYS = ("prompt_id", "row", "num_rows", "sample", "attempt", "reward", "server")
_OF_BATCH = ("trained_step", "batch")
_ROWS_AT_ONCE = 64
_FORMAT: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": [*(f"{key}.list.element" for key in ("loss_mask", "versions")), "prompt_id", "server"],
    # Byte-stream split: 1.6 bytes per token id and 3.4 per logprob, against 1.9 and 4.4 with zstd alone.
    "use_byte_stream_split": [f"{key}.list.element" for key in ("input_ids", "logprobs", *PER_TOKEN_OF_UPDATE)],
    "write_page_checksum": True,
}
# Reading one row decodes its whole row group; smaller groups would take more bytes.
_GROUP_ROWS, _GROUP_BYTES = 256, 2**22


def write_batch(path: Path, tables: Sequence[pa.Table], trained_step: int | None) -> None:
    """Write the rows of a batch to `<name>/<K>.parquet`, durably."""
    table = pa.concat_tables(tables, promote_options="permissive").replace_schema_metadata(tables[0].schema.metadata)
    for name, value in zip(_OF_BATCH, (trained_step, int(path.stem))):
        table = table.append_column(name, pa.array([value] * len(table), pa.int64()))
    write_table(path, table)


def write_table(path: Path, table: pa.Table) -> None:
    """Write the rows of a file, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    group_rows = max(1, min(_GROUP_ROWS, _GROUP_BYTES * len(table) // max(1, table.nbytes)))
    pq.write_table(table, buffer := pa.BufferOutputStream(), row_group_size=group_rows, **_FORMAT)
    write_atomically(path, buffer.getvalue().to_pybytes(), is_durable=True)


def update_file(batch: Path) -> Path:
    """Return the file of the update's numbers for the rows of a batch."""
    return batch.parent / "_update" / batch.name


def batch_files(path: Path) -> dict[int, Path]:
    """Return the batch files of a name, such as `rollouts/step_3`, by number; empty without a folder."""
    return numbered(path, "", ".parquet")


def read_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Read the rows of all batches of a name in order, restricted to `columns` if given. FileError names the file."""
    for file in batch_files(path).values():
        yield from read_file(file, columns)


def read_file(path: Path, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Read the rows of one batch."""
    with _opened(path) as file:
        names = file.schema_arrow.names
        if lacking := [name for name in columns or (*_ALWAYS, *_OF_BATCH) if name not in (*names, *_OPTIONAL)]:
            raise ValueError(f"no column {', '.join(lacking)}")
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(columns) or None):
            for row in batch.to_pylist():
                yield dict.fromkeys(columns) | row if columns else _filled(row)


def read_columns(path: Path, columns: Sequence[str]) -> tuple[pa.Table, list[int]]:
    """Read the columns that the file of a batch has; also return the end of each row group.

    `more.name` names one of the further keys.
    """
    with _opened(path) as file:
        return file.read(columns=[*columns]), _group_ends(file)


def read_segments(path: Path, group: int) -> pa.ChunkedArray | None:
    """Read the texts of one row group of a batch; None if they are not stored."""
    with _opened(path) as file:
        table = file.read_row_group(group, columns=["segments"])
        return table.column("segments") if table.column_names else None


def read_places(path: Path, group: int, places: Sequence[int]) -> list[dict[str, Any]]:
    """Read some rows of one row group of a batch."""
    with _opened(path) as file:
        table = file.read_row_group(group)
        return [_filled(table.slice(place, 1).to_pylist()[0]) for place in places]


def read_update(batch: Path, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Read the update's numbers for rows of a batch, by their places; empty dicts without an update."""
    path, numbers = update_file(batch), list[dict[str, Any]]()
    if not path.exists():
        return [{}] * len(rows)
    with _opened(path) as file:
        ends = _group_ends(file)
        groups = (bisect.bisect_right(ends, row) for row in rows)
        for group, same in itertools.groupby(zip(groups, rows), key=lambda pair: pair[0]):
            table, start = file.read_row_group(group), ends[group] - file.metadata.row_group(group).num_rows
            numbers += [table.slice(row - start, 1).to_pylist()[0] for _, row in same]
    return numbers


def _group_ends(file: pq.ParquetFile) -> list[int]:
    """Return the end of each row group."""
    return [*itertools.accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))]


def metadata_of(path: Path) -> dict[bytes, bytes]:
    """Return the metadata of a batch's table."""
    with _opened(path) as file:
        return dict(file.schema_arrow.metadata or {})


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    with reading(path, pa.ArrowException), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Add missing columns as None, and drop the null half of each segment."""
    row = dict.fromkeys(_OPTIONAL) | row | {"more": row.get("more") or {}}
    if row["segments"] is not None:
        row["segments"] = [{kind: text for kind, text in one.items() if text is not None} for one in row["segments"]]
    return row

"""The files of a run's rollouts: a Parquet file per batch, `rollouts/<name>/<K>.parquet`, with its rows in turn.

Invariant: a file is whole or absent. A row has no padding; `sample` says which run of the group it belongs to, `row`
and `num_rows` its place in the episode, `segments` the texts of what was given and sampled in turn; `more` has the keys
beyond the usual ones. Rows of an episode that `rollout.stored_share` leaves out have no tokens and texts: prompts and
rewards are always complete. Patches of images are left out, as they are a thousand times the size of all else.
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
    # Bytes of equal weight side by side: 1.6 bytes per token id and 3.4 per logprob, where zstd alone has 1.9 and 4.4.
    "use_byte_stream_split": [f"{key}.list.element" for key in ("input_ids", "logprobs", *PER_TOKEN_OF_UPDATE)],
    "write_page_checksum": True,
}
# Rows are read one by one too, each at the cost of decoding its group; smaller ones would cost more bytes.
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
    """Return the file of what an update computed for the rows of a batch."""
    return batch.parent / "_update" / batch.name


def batch_files(path: Path) -> dict[int, Path]:
    """Return the files of the batches of a name, such as `rollouts/step_3`, by their number; none without a folder."""
    return numbered(path, "", ".parquet")


def read_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Read the rows of all batches of a name, in the order in which they were handed out; FileError names the file.

    `columns` are all that is read of them, if any are given.
    """
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
    """Read those of the columns that the file of a batch has; return also where each of its row groups ends.

    `more.name` is one of the further keys.
    """
    with _opened(path) as file:
        return file.read(columns=[*columns]), _group_ends(file)


def read_group(path: Path, group: int, columns: Sequence[str]) -> pa.Table:
    """Read those of the columns that there are, of one row group of a batch."""
    with _opened(path) as file:
        return file.read_row_group(group, columns=[*columns])


def read_places(path: Path, group: int, places: Sequence[int]) -> list[dict[str, Any]]:
    """Read some rows of one row group of a batch."""
    with _opened(path) as file:
        table = file.read_row_group(group)
        return [_filled(table.slice(place, 1).to_pylist()[0]) for place in places]


def read_update(batch: Path, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Read what an update computed for some rows of a batch, by their places in it; without an update it is nothing."""
    path, found = update_file(batch), list[dict[str, Any]]()
    if not path.exists():
        return [{}] * len(rows)
    with _opened(path) as file:
        ends = _group_ends(file)
        groups = (bisect.bisect_right(ends, row) for row in rows)
        for group, same in itertools.groupby(zip(groups, rows), key=lambda pair: pair[0]):
            table, start = file.read_row_group(group), ends[group] - file.metadata.row_group(group).num_rows
            found += [table.slice(row - start, 1).to_pylist()[0] for _, row in same]
    return found


def _group_ends(file: pq.ParquetFile) -> list[int]:
    """Return where each row group ends."""
    return [*itertools.accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))]


def metadata_of(path: Path) -> dict[bytes, bytes]:
    """Return what was noted in the tables of a batch."""
    with _opened(path) as file:
        return dict(file.schema_arrow.metadata or {})


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    with reading(path, pa.ArrowException), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the columns that its file lacks, and without what is not in its segments."""
    row = dict.fromkeys(_OPTIONAL) | row | {"more": row.get("more") or {}}
    if row["segments"] is not None:
        row["segments"] = [{kind: text for kind, text in one.items() if text is not None} for one in row["segments"]]
    return row

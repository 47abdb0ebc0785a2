"""The index of the trajectories of a run: their columns, their contents, and the search for a text.

Rows are numbered in the order in which their files are listed. Invariant: within a generation a number means one row; a
run that resumes removes steps, and the index then starts again under the next generation. Files are whole or absent, so
a run that trains can be read at any time.
"""

import bisect
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arealite.api.errors import AReaLiteError, ConfigError
from arealite.rollout.account.rollout_file import batch_files, read_columns, read_places, read_segments, read_update
from arealite.utils.files import FileError, reading

_NUMBERS = dict.fromkeys(("row", "num_rows", "sample", "attempt"), pa.int64()) | {"reward": pa.float64()}
_COLUMNS = ("prompt_id", *_NUMBERS, "versions", "loss_mask", "more.no_eos")
_SETTLED_NS = 2_000_000_000  # a folder's mtime shows a later change only if it is older than the clock's tick
_CACHED_GROUPS = 16
_SNIPPET = 200  # characters
_NONE = np.iinfo(np.int64).max

Stamp = tuple[int, int, int]


class StaleIndexError(AReaLiteError):
    """The run has removed rows since the client got its row numbers."""


@dataclass(frozen=True)
class _File:
    path: Path
    start: int  # number of its first row
    columns: dict[str, Any]  # one value per row
    groups: list[int]  # ends of its row groups

    @property
    def end(self) -> int:
        return self.start + (self.groups[-1] if self.groups else 0)


class RowIndex:
    """The rows below `rollouts/`, or in the folders that `only` names. Not thread-safe."""

    def __init__(self, folder: Path, only: Collection[str] | None = None) -> None:
        self._folder, self._only = folder, only
        self.generation = 0
        self._folders: dict[str, tuple[int, dict[Path, Stamp]]] = {}
        self._segments_of = functools.lru_cache(_CACHED_GROUPS)(read_segments)
        self._clear()

    def __len__(self) -> int:
        return self._files[-1].end if self._files else 0

    def grow(self, seconds: float) -> bool:
        """Index new files for about `seconds`; return whether the index is complete."""
        deadline = time.monotonic() + seconds
        self._list()
        while self._waiting:
            path = self._waiting.popleft()
            try:
                self._files.append(_File(path, len(self), *_columns(path)))
            except FileError as error:
                self._complain(error)
            if time.monotonic() >= deadline:
                break
        return not self._waiting

    def columns(self, generation: int, start: int) -> dict[str, Any]:
        """Return the columns of the rows from `start` on, and of all rows if another generation is asked for.

        `names` are their folders, each with its number of rows.
        """
        start = min(max(start, 0), len(self)) if generation == self.generation else 0
        columns: dict[str, Any] = {"generation": self.generation, "start": start, "count": len(self) - start}
        files = [file for file in self._files if file.end > start]
        places = [max(start - file.start, 0) for file in files]
        columns["names"] = [(file.path.parent.name, file.groups[-1] - place) for file, place in zip(files, places)]
        for key in files[0].columns if files else ():
            parts = [file.columns[key][place:] for file, place in zip(files, places)]
            columns[key] = [*itertools.chain(*parts)] if key == "prompt_id" else np.concatenate(parts)
        return columns

    def row(self, generation: int, number: int) -> dict[str, Any]:
        """Return a row, with its folder as `name`."""
        return next(self.rows(generation, [number]))

    def rows(self, generation: int, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield rows in turn, with the numbers of their update; neighbours are read together."""
        located = (self._place(generation, number) for number in numbers)
        for (path, group), same in itertools.groupby(located, key=lambda place: (place[0].path, place[1])):
            (file, *_), *_ = within = [*same]
            start, problems = file.groups[group - 1] if group else 0, list[str]()
            places = [place for _, _, place in within]
            try:
                updates = read_update(path, [start + place for place in places])
            except FileError as error:
                updates, problems = [{}] * len(within), [str(error)]
            for row, update in zip(read_places(path, group, places), updates):
                yield {"name": path.parent.name, "update": update, "problems": problems} | row

    def snippets(self, generation: int, numbers: Sequence[int]) -> list[str]:
        """Return the first sampled characters of each row."""
        return [self._snippet(*self._place(generation, number)) for number in numbers]

    def search(self, generation: int, text: str, rows: range, seconds: float) -> tuple[list[int], int]:
        """Search a range of rows for a text, ignoring case, last file first, for about `seconds`.

        Return the numbers of the matches, and the end of the rows left to search, `rows.start` when none are left.
        """
        self._require(generation)
        deadline, matches = time.monotonic() + seconds, list[int]()
        for file in reversed([file for file in self._files if file.start < rows.stop and file.end > rows.start]):
            try:
                matches += [number for number in (_holding(file.path, text) + file.start).tolist() if number in rows]
            except FileError as error:
                self._complain(error)
            if time.monotonic() >= deadline:
                return matches, max(file.start, rows.start)
        return matches, rows.start

    def _complain(self, error: FileError) -> None:
        if str(error) not in self.problems:
            self.problems.append(str(error))

    def _clear(self) -> None:
        self.problems: list[str] = []  # with files that could not be read
        self._files: list[_File] = []
        self._waiting: deque[Path] = deque()
        self._stamps: dict[Path, Stamp] = {}  # of all listed files
        self._segments_of.cache_clear()

    def _list(self) -> None:
        """Queue new files, or start again if a file is gone."""
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        self._folders = {name: self._files_of(name) for name in (names if self._only is None else self._only)}
        now = {path: status for _, files in self._folders.values() for path, status in files.items()}
        if any(now.get(path) != status for path, status in self._stamps.items()):
            self.generation += 1
            self._clear()
        self._waiting.extend(sorted(now.keys() - self._stamps.keys(), key=_in_order))
        self._stamps = now

    def _files_of(self, name: str) -> tuple[int, dict[Path, Stamp]]:
        """Return the mtime of a folder, -1 while a change may not show in it, and its files, listed once per mtime."""
        path, known = self._folder / name, self._folders.get(name)
        if (folder := stamp(path)) is None:  # removed meanwhile
            return -1, {}
        if known is not None and known[0] == folder[1]:
            return known
        is_settled = folder[1] < time.time_ns() - _SETTLED_NS  # before listing it
        files = {file: status for file in batch_files(path).values() if (status := stamp(file)) is not None}
        return folder[1] if is_settled else -1, files

    def _require(self, generation: int) -> None:
        if generation != self.generation:
            raise StaleIndexError(
                f"rows must be asked for by their numbers of now: got generation {generation} of {self.generation}. "
                "The run removed steps: read its rows again."
            )

    def _place(self, generation: int, number: int) -> tuple[_File, int, int]:
        """Return the file of a row, its row group, and its place in that."""
        self._require(generation)
        if not 0 <= number < len(self):
            raise ConfigError(f"a row must be in 0 .. {len(self) - 1}: got {number}.")
        file = self._files[bisect.bisect_right(self._files, number, key=lambda file: file.end)]
        group = bisect.bisect_right(file.groups, number - file.start)
        return file, group, number - file.start - (file.groups[group - 1] if group else 0)

    def _snippet(self, file: _File, group: int, place: int) -> str:
        try:
            segments = self._segments_of(file.path, group)
        except FileError:  # opening the row names it
            return ""
        parts = segments[place].as_py() if segments is not None else None
        return next((part["sampled"] for part in parts or () if part.get("sampled")), "")[:_SNIPPET]


def _columns(path: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the columns of the rows of a file, and the ends of its row groups.

    `staleness` is -1 where no update trained the row or its tokens are not stored; `step` comes from the folder's name.
    """
    table, groups = read_columns(path, _COLUMNS)
    with reading(path, pa.ArrowException):
        kind, _, number = path.parent.name.rpartition("_")
        columns: dict[str, Any] = {"prompt_id": table.column("prompt_id").cast(pa.string()).fill_null("").to_pylist()}
        columns |= {key: table.column(key).cast(kind).to_numpy() for key, kind in _NUMBERS.items()}
        step = int(number) if number.isdecimal() else -1
        columns["step"] = np.full(len(table), step, np.int32)
        columns["sampled"], columns["tokens"], oldest = _of_tokens(table)
        columns["truncated"] = np.zeros(len(table), bool)
        if "more" in table.column_names:
            no_eos = pc.struct_field(table.column("more"), "no_eos")
            columns["truncated"] = pc.fill_null(no_eos.cast(pa.bool_()), False).to_numpy()
        is_known = (oldest < _NONE) & (kind == "step")
        columns["staleness"] = np.where(is_known, step - oldest, -1).astype(np.int32)
        return columns, groups


def _of_tokens(table: pa.Table) -> tuple[Any, Any, Any]:
    """Return the numbers of sampled and of all tokens of each row, and the oldest version that sampled a token."""
    masks, versions = (table.column(key).combine_chunks() for key in ("loss_mask", "versions"))
    offsets = np.asarray(masks.offsets).astype(np.int64)
    is_sampled = masks.values.to_numpy(zero_copy_only=False).astype(bool)
    sums = np.concatenate([[0], is_sampled.cumsum()])
    lengths, sampled = offsets[1:] - offsets[:-1], sums[offsets[1:]] - sums[offsets[:-1]]
    of_sampled = np.where(is_sampled, versions.values.to_numpy(zero_copy_only=False), _NONE)
    # `reduceat` gives an empty row the entry at its start, which may lie behind the last one.
    oldest = np.minimum.reduceat(np.append(of_sampled, _NONE), offsets[:-1]) if len(table) else lengths
    return sampled, lengths, np.where(sampled > 0, oldest, _NONE)


def _holding(path: Path, text: str) -> Any:
    """Return the places of the rows of a file that contain a text."""
    table, _ = read_columns(path, ("segments",))
    if not table.column_names:
        return np.empty(0, np.int64)
    with reading(path, pa.ArrowException):
        rows = table.column("segments").combine_chunks()
        parts = rows.values
        is_hit = np.zeros(len(parts), bool)
        for kind in ("given", "sampled"):
            hits = pc.match_substring(parts.field(kind), text, ignore_case=True)
            is_hit |= pc.fill_null(hits, False).to_numpy(zero_copy_only=False)
        return np.unique(np.searchsorted(np.asarray(rows.offsets), np.flatnonzero(is_hit), side="right") - 1)


def stamp(path: Path) -> Stamp | None:
    """Return a value that changes when a file is replaced; None if the file is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _in_order(path: Path) -> tuple[str, int, int]:
    """Sort files by the kind of their folder, its number and theirs."""
    kind, _, number = path.parent.name.rpartition("_")
    return (kind, int(number), int(path.stem)) if number.isdecimal() else (path.parent.name, -1, int(path.stem))

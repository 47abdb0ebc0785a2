"""Rows that stay in their source: an Arrow file, a file of JSON lines, or a function's list.

A source has a length, `read(start, stop)`, and `content`, a text that changes when any row does (None if changes can't
be noticed). `Rows` is a view of a source that makes rows at access: memory does not depend on the size of a data set.
"""

import hashlib
import json
import os
import re
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from marshal import dumps as marshalled
from pathlib import Path
from typing import Any, Protocol, overload

import datasets
import numpy as np
import orjson

from arealite.utils.files import FileError, reading

Row = dict[str, Any]
CHUNK = 1000  # rows per read
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class Source(Protocol):
    """The storage that a view reads."""

    @property
    def content(self) -> str | None: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> list[Any]:
        """Return the rows from `start` up to `stop`."""


class Rows(Sequence[Row]):
    """The rows of a source at `indices`, each as `make(row, index)` returns it at access.

    `checksum` is `checksum_of` all rows, if it is known.
    """

    def __init__(
        self,
        source: Source,
        indices: Any = None,  # a range or an array
        make: Callable[[Row, int], Row] | None = None,
        checksum: int | None = None,
    ) -> None:
        self._source, self._make, self.checksum = source, make, checksum
        self._indices = range(len(source)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Row]:
        return (row for start in range(0, len(self), CHUNK) for row in self.read(start, start + CHUNK))

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "Row | Rows":
        if isinstance(index, slice):
            return Rows(self._source, self._indices[index], self._make)
        return self._at(int(self._indices[index]))

    def read(self, start: int, stop: int) -> list[Row]:
        """Return the rows from `start` up to `stop`."""
        chosen = self._indices[start:stop]
        if len(chosen) == 0:
            return []
        if not isinstance(chosen, range) or chosen.step != 1:
            return [self._at(int(index)) for index in chosen]
        rows = self._source.read(chosen.start, chosen.stop)
        return rows if self._make is None else [self._make(row, at) for row, at in zip(rows, chosen, strict=True)]

    def _at(self, index: int) -> Row:
        row = self._source.read(index, index + 1)[0]
        return row if self._make is None else self._make(row, index)

    @property
    def content(self) -> str | None:
        """A text that changes when a row, the choice or the order of rows does; None if changes can't be noticed."""
        if self._source.content is None or self._make is not None:
            return None
        chosen = self._indices if isinstance(self._indices, range) else digest_of(np.asarray(self._indices).tobytes())
        return f"{self._source.content} {chosen}"


class ListRows:
    """Rows of a Python list."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[Any]:
        return list(self._rows[start:stop])

    @property
    def content(self) -> str | None:
        digest = hashlib.blake2b(digest_size=16)
        try:
            for row in self._rows:
                digest.update(marshalled(row, 2))
        except ValueError:  # a value is not plain data
            return None
        return digest.hexdigest()


class ArrowRows:
    """Rows of a `datasets.Dataset` as they are stored, without decoding or transforms."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._stored = dataset.with_format("arrow")
        self.content = str(dataset._fingerprint)

    def __len__(self) -> int:
        return len(self._stored)

    def read(self, start: int, stop: int) -> list[Any]:
        return list(self._stored[start:stop].to_pylist())


class JsonLines:
    """Rows of a file of JSON lines, parsed at access: Arrow's columns can't hold every JSON value.

    The file is read by position, not mapped: a truncated file raises FileError instead of ending the process.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._changed_at = os.fstat(self._file).st_mtime_ns
        digest, starts, position = hashlib.blake2b(digest_size=16), array("q"), 0
        for line in self._lines():
            digest.update(line)
            if line.decode("utf-8").strip():
                starts.append(position)
            position += len(line)
        starts.append(position)
        self.content, self._starts = digest.hexdigest(), starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, start: int, stop: int) -> list[Any]:
        first, last = self._starts[start], self._starts[stop]
        with reading(self._path):
            text = os.pread(self._file, last - first, first)
            if len(text) < last - first or os.fstat(self._file).st_mtime_ns != self._changed_at:
                raise FileError(
                    f"{self._path} must stay as it was when it was read first: got a change since. Start again, and do "
                    "not write the file during the run."
                )
            lines = (line.decode("utf-8") for line in text.splitlines())
            return [self._parse(line, start + at) for at, line in enumerate(filter(str.strip, lines))]

    def _parse(self, line: str, index: int) -> Any:
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            ends = accumulate(map(len, self._lines()))
            number = 1 + sum(1 for end in ends if end <= self._starts[index])
            raise FileError(
                f"{self._path}:{number} must be one JSON object per line: {error}. Fix the line."
            ) from error

    def _lines(self) -> Iterator[bytes]:
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            for line in file:
                yield from line.splitlines(keepends=True) if b"\r" in line else (line,)


class Chain:
    """The rows of several sources, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts, self._starts = parts, [0, *accumulate(map(len, parts))]
        contents = [part.content for part in parts]
        self.content = None if None in contents else " ".join(map(str, contents))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> list[Any]:
        return [
            row
            for part, (first, end) in zip(self._parts, pairwise(self._starts), strict=True)
            if start < end and stop > first
            for row in part.read(max(start - first, 0), min(stop, end) - first)
        ]


def digest_of_row(row: object) -> int:
    """Return 63 bits of a row as it is stored; values that are not plain data count by their type."""
    try:
        text = orjson.dumps(row, lambda value: type(value).__name__, _JSON)
    except TypeError:  # numbers, text or keys that JSON does not have
        text = re.sub(r" at 0x[0-9a-f]+", "", ascii(row)).encode()  # addresses of objects change
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def checksum_of(digests: "np.ndarray[Any, np.dtype[np.int64]]") -> int:
    """Return one number for the digests of all rows, in their order."""
    return int(digest_of(digests.tobytes())[:12], 16)


def digest_of(*parts: bytes) -> str:
    """Return a digest that changes when any of the parts does."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()

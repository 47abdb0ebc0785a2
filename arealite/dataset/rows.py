"""Rows that stay on the disk, or in memory if they come as a list, in the Arrow tables of `datasets`.

Rows of Python are pickled and those of JSON lines stay JSON, as Arrow's columns can't hold every value. Pickles are
kept in memory only: reading one runs code, and others may write to the cache. `Rows` is a view that makes rows at
access: memory does not depend on the size of a data set.
"""

import hashlib
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import datasets
import numpy as np
import orjson
from datasets.exceptions import DatasetGenerationError

from arealite.utils import heartbeat
from arealite.utils.files import free_space

Row = dict[str, Any]
CHUNK = 1000  # rows per read
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
PICKLED, JSON = "pickled_row", "json_row"
JSON_ROW = datasets.Features({JSON: datasets.Value("large_string")})


class Rows(Sequence[Row]):
    """The rows of a table or a list, as they are stored (nothing is decoded), each as `make` returns it at access.

    `checksum` is `checksum_of` all rows, if it is known.
    """

    def __init__(
        self,
        stored: datasets.Dataset | Sequence[Any],
        make: Callable[[Row], Row] | None = None,
        checksum: int | None = None,
    ) -> None:
        if not isinstance(stored, datasets.Dataset):
            features = datasets.Features({PICKLED: datasets.Value("large_binary")})
            stored = datasets.Dataset.from_dict({PICKLED: [*map(_pickled, stored)]}, features)
        self.table, self._make, self.checksum = stored.with_format("arrow"), make, checksum

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Row]:
        return (row for start in range(0, len(self), CHUNK) for row in self.read(start, start + CHUNK))

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> "Rows": ...

    def __getitem__(self, index: int | slice) -> "Row | Rows":
        chosen = range(len(self))[index]
        return Rows(self.table.select(chosen or []), self._make) if isinstance(chosen, range) else self.read(chosen)[0]

    def read(self, start: int, stop: int | None = None) -> list[Row]:
        """Return the rows from `start` up to `stop`, or one."""
        rows = [*map(_loaded, self.table[start : start + 1 if stop is None else stop].to_pylist())]
        return rows if self._make is None else [self._make(row) for row in rows]

    @property
    def content(self) -> str:
        """A text that changes when a row, the choice or the order of stored rows does."""
        return str(self.table._fingerprint)


def _loaded(stored: Row) -> Any:
    """Return a row as it was; in a sum of sources each has the columns of all, null where they are not its own."""
    pickle_, line = stored.pop(PICKLED, None), stored.pop(JSON, None)
    return pickle.loads(pickle_) if pickle_ is not None else stored if line is None else json.loads(line)


def _pickled(row: Any) -> bytes:
    try:
        return pickle.dumps(row)
    except Exception as error:
        raise ValueError(
            f"rows must be plain data, or what pickle takes: got {row!r:.200} ({error}). Convert it."
        ) from error


def written(
    entries: Callable[[], Iterator[Row]], features: datasets.Features, key: str | None, *, what: str
) -> datasets.Dataset:
    """Return what `entries` yields as a table in the cache of `datasets`, under a key that names the content.

    One process of those that share the cache writes it under the lock of that library; the others wait for the lock
    and map what was written. Without a key the table is for this process only.
    """
    root = Path(datasets.config.HF_DATASETS_CACHE) / "arealite"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (
            heartbeat.waiting(f"the rows of {what} to be prepared", on="ranks"),
            tempfile.TemporaryDirectory(dir=root) as own,  # files stay mapped after their folder is removed
        ):
            folder = str(root) if key else own
            return datasets.Dataset.from_generator(entries, features, folder, fingerprint=key or "none")
    except (OSError, DatasetGenerationError) as error:
        if not isinstance(cause := error.__cause__ or error, OSError):
            raise cause from None  # for example, the mistake in a row
        raise OSError(
            f"{root} must be a folder that can be written and locked: got {cause}, with {free_space(root)}. "
            "Set HF_DATASETS_CACHE to another folder."
        ) from error


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

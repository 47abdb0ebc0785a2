"""Sources of rows: the hub, files, or a function of the user's."""

import codecs
import inspect
import io
import json
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import parse_qsl

import datasets
import pyarrow
from pyarrow import csv

from arealite.api.cli_args import DatasetConfig
from arealite.api.config.data import GYM, OPENENV, VERIFIERS
from arealite.dataset.gym import gym_rows
from arealite.dataset.openenv import openenv_rows
from arealite.dataset.rows import JSON, JSON_ROW, PICKLED, Row, Rows, written
from arealite.dataset.verifiers import verifiers_rows
from arealite.utils.files import FileError, file_entry, reading

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
ACCEPTED = (
    "'gsm8k', a data set of the hub ('org/name'), a .jsonl, .json, .parquet or .csv file (JSON also as .gz or .zst), a "
    "folder of such files or from save_to_disk, 'FILE.py:FUNCTION?option=value', 'reasoning_gym:TASK?size=2000', "
    "'verifiers:ENV', 'openenv:http://HOST:PORT', or 'hf-dataset://org/name/file/in/the/repository.jsonl'"
)
_HUB_SCHEME = "hf-dataset://"
_HUB_FILE = re.compile(rf"{_HUB_SCHEME}([^/]+/[^/]+)/(.+)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_CSV_ROW = 2**28  # bytes
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_SAVED = ("dataset_dict.json", "state.json")  # of `save_to_disk`: with splits, or without
_FUNCTION = re.compile(r"(.+\.py):(\w+)(?:\?(.*))?")


class MissingSplitError(ValueError):
    """The source has no split of that name."""


def read_rows(config: DatasetConfig, split: str, seed: int) -> Rows:
    """Return the rows of a split, or of parts of it (`train[:95%]`, `train+test`), in the order of the source."""
    names = [part.partition("[")[0].strip() for part in split.split("+")]
    splits = {name: _rows_of(_read_split(config, name, seed), config.path) for name in names}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(splits[name]) for name in names})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"split must be like train, train[:95%] or train+test: got {split!r}. {error}") from error
    chosen = [splits[part.splitname][part.from_ : part.to].table for part in parts]
    rows = Rows(datasets.concatenate_datasets(chosen))
    if not rows:
        raise ValueError(f"dataset {config.path} must have rows: got none in {split}. Check the path and the split.")
    return rows


def _rows_of(given: datasets.Dataset | Sequence[Any], path: str) -> Rows:
    """Refuse a table that others have made with the column of our own pickles, as to read one runs code."""
    if isinstance(given, datasets.Dataset) and PICKLED in given.column_names:
        raise ValueError(f"dataset {path} must have no column {PICKLED}: got one. Rename it.")
    return Rows(given)


def _read_split(config: DatasetConfig, split: str, seed: int) -> datasets.Dataset | Sequence[Any]:
    path, local = config.path, Path(config.path).expanduser()
    if path.startswith((VERIFIERS, OPENENV)):  # whose options may name functions
        if split != "train":
            raise MissingSplitError(f"{path} must have the split {split}: got train alone. Name another environment.")
        return verifiers_rows(path) if path.startswith(VERIFIERS) else openenv_rows(path)
    if match := _FUNCTION.fullmatch(path):
        rows = _call(match[1], match[2], match[3] or "", split, seed)
        if not isinstance(rows, Sequence | datasets.Dataset):
            got = type(rows).__name__
            raise ValueError(f"{match[1]}:{match[2]} must return a list of rows, or a Dataset: got {got}. Correct it.")
        return rows
    if path.startswith(GYM):
        return gym_rows(path, split, seed)
    if match := _HUB_FILE.fullmatch(path):
        return _load_hub(match[1], data_files=match[2], split="train")
    if path in ("gsm8k", "openai/gsm8k"):
        return _of_splits(path, _load_hub("openai/gsm8k", config.config_name or "main"), split)
    if local.is_dir() and (local / "data").is_dir():  # a data set of the hub that was downloaded
        return _of_splits(path, _load_hub(str(local), config.config_name), split)
    if any((local / name).is_file() for name in _SAVED):
        saved = datasets.load_from_disk(str(local))
        return _of_splits(path, {"train": saved} if isinstance(saved, datasets.Dataset) else saved, split)
    if path and local.exists():
        local = _file_of_split(local, split) if local.is_dir() else local
        return _read_file(local)
    if path.endswith(SUFFIXES) and not path.startswith(_HUB_SCHEME):
        raise ValueError(f"dataset file must exist: got {path!r}, which does not. Correct the path of the data set.")
    if _HUB_NAME.fullmatch(path):
        return _of_splits(path, _load_hub(path, config.config_name), split)
    raise ValueError(f"dataset path must be {ACCEPTED}: got {path!r}, which is none of them. Correct it.")


def _of_splits(path: str, splits: Mapping[str, datasets.Dataset], split: str) -> datasets.Dataset:
    """Return a split of those of a data set."""
    if split not in splits:
        raise MissingSplitError(
            f"data set {path} must have the split {split}: got {', '.join(splits)}. Set train_dataset.split (or "
            "valid_dataset.split)."
        )
    return splits[split]


def _load_hub(path: str, *names: Any, **options: Any) -> Any:
    try:
        return datasets.load_dataset(path, *names, **options)
    except (ValueError, OSError) as error:  # OSError: no such data set, and no connection
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"data set {path} must be on the hub, or a file or folder here: got {reason}. "
            "Correct its path or config_name."
        ) from error


def _call(file: str, name: str, query: str, split: str, seed: int) -> Any:
    """Call `name(split, seed=seed, **options)` of a Python file; options of the query are text."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"dataset file must exist: got {file!r}, which does not. Correct the path of the data set.")
    function, options = runpy.run_path(str(path)).get(name), dict(parse_qsl(query, keep_blank_values=True))
    if not callable(function):
        raise ValueError(f"{file} must have a function {name}: got none. Correct the path of the data set.")
    try:
        inspect.signature(function).bind(split, seed=seed, **options)
    except TypeError as error:
        raise ValueError(f"{file}:{name} must take (split, *, seed) and the given options: {error}.") from error
    return function(split, seed=seed, **options)


def _file_of_split(folder: Path, split: str) -> Path:
    """Return the one file that is named after the split (`train.jsonl`, `my_train.parquet`; not `latest.jsonl`)."""
    named = re.compile(rf"(?<![A-Za-z]){re.escape(split)}")
    files = [file for file in folder.iterdir() if file.name.endswith(SUFFIXES) and named.search(file.stem)]
    if len(files) != 1:
        names = sorted(file.name for file in folder.iterdir())
        raise (ValueError if files else MissingSplitError)(
            f"dataset folder {folder} must hold one {'/'.join(SUFFIXES)} file with {split!r} in its name: "
            f"got {names}. Give the path of the file."
        )
    return files[0]


def _read_file(path: Path) -> datasets.Dataset | Sequence[Any]:
    if not path.name.endswith(SUFFIXES):
        raise FileError(f"dataset file must end in {', '.join(SUFFIXES)}: got {path}. Convert it.")
    with reading(path):
        if path.suffix == ".parquet":
            return datasets.Dataset.from_parquet(str(path))
        if path.suffix == ".csv":
            return _read_csv(path)
        if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
            with _opened(path) as file:
                rows = json.load(file)
            if not isinstance(rows, list):
                got = type(rows).__name__
                raise FileError(f"{path} must hold a JSON list of objects: got {got}. Use .jsonl for lines.")
            return rows
        key = file_entry(path)["sha256"]
    return written(lambda: _json_lines(path), JSON_ROW, key, what=str(path))


def _opened(path: Path) -> TextIO:
    """Open a text that may be compressed, in UTF-8 or as its first bytes say."""
    codec = _CODECS.get(path.suffix)
    with pyarrow.input_stream(str(path), compression=codec) as file:
        encoding = _encoding(file.read(2))
    return io.TextIOWrapper(pyarrow.input_stream(str(path), compression=codec), encoding)


def _encoding(first: bytes) -> str:
    return "utf-16" if first in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _json_lines(path: Path) -> Iterator[Row]:
    """Yield the checked lines of a file: the run does not read it again."""
    with reading(path), _opened(path) as file:
        lines = ((number, line.rstrip("\n")) for number, line in enumerate(file, start=1) if line.strip())
        number = 0
        for number, line in lines:
            try:
                json.loads(line)
            except json.JSONDecodeError as error:
                raise FileError(f"{path}:{number} must be one JSON object per line: {error}. Fix the line.") from error
            yield {JSON: line}
        if number == 0:
            raise FileError(f"{path} must have rows: got none. Check the path.")


def _read_csv(path: Path) -> datasets.Dataset:
    """Return the rows below the header; each value is the text of its cell."""
    with path.open("rb") as file:
        encoding = _encoding(file.read(2)).removesuffix("-sig")  # pyarrow skips it by itself
    blocks = csv.ReadOptions(block_size=_MAX_CSV_ROW, encoding=encoding)
    names = csv.open_csv(path, blocks).schema.names
    texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    return datasets.Dataset(csv.read_csv(path, blocks, csv.ParseOptions(newlines_in_values=True), texts))

"""Question-and-answer rows in the shape of GSM8K, from the hub, from files, or from a function of the user's."""

from __future__ import annotations

import inspect
import json
import runpy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import datasets

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_hub(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
    """Download a split of a hub dataset (or take it from the local cache)."""
    return _checked(datasets.load_dataset(name, config, split=split).to_list(), f"{name} ({split})")


def read_hub_file(name: str, file: str) -> list[dict[str, Any]]:
    """Download one file of a hub dataset."""
    return _checked(datasets.load_dataset(name, data_files=file, split="train").to_list(), f"{name}/{file}")


def read_function(file: str, name: str, query: str, split: str, seed: int) -> list[dict[str, Any]]:
    """Call `name(split, seed=seed, **options)` of a Python file, which returns rows; options of the query are text."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"dataset file must exist: got {file!r}, which does not. Correct train_dataset.path.")
    function, options = runpy.run_path(str(path)).get(name), dict(parse_qsl(query, keep_blank_values=True))
    if not callable(function):
        raise ValueError(f"{file} must have a function {name}: got none. Correct train_dataset.path.")
    try:
        inspect.signature(function).bind(split, seed=seed, **options)
    except TypeError as error:
        raise ValueError(f"{file}:{name} must take (split, *, seed) and the given options: {error}.") from error
    return _checked(function(split, seed=seed, **options), f"{file}:{name}")


def read_path(path: Path, split: str) -> list[dict[str, Any]]:
    """Read a file, or the one file of a folder that is named after the split (`train.jsonl`, `my_train.parquet`).

    A file is a split by itself: `split` only chooses within a folder.
    """
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and split in file.stem)
        if len(found) != 1:
            names = sorted(file.name for file in path.iterdir())
            raise ValueError(
                f"dataset folder {path} must hold one {'/'.join(SUFFIXES)} file with {split!r} in its name: "
                f"got {names}. Give the path of the file."
            )
        path = found[0]
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"dataset file must end in {', '.join(SUFFIXES)}: got {path}. Convert it.")
    return _checked(readers[path.suffix](path), str(path))


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}:{number} must be one JSON object per line: {error}. Fix the line."
                    ) from error
    return rows


def _read_json(path: Path) -> list[Any]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a JSON list of objects: got {type(rows).__name__}. Use .jsonl for lines.")
    return rows


def _read_parquet(path: Path) -> list[Any]:
    rows: list[Any] = datasets.Dataset.from_parquet(str(path)).to_list()
    return rows


def _checked(rows: list[Any], source: str) -> list[dict[str, Any]]:
    if not rows:
        raise ValueError(f"dataset {source} must have rows: got none. Check the path.")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or row.get("question") is None or row.get("answer") is None:
            got = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"every row of {source} must have the columns question and answer: got {got} in row {index}. "
                "Rename the columns or drop the row."
            )
    return [{**row, "question": str(row["question"]), "answer": str(row["answer"])} for row in rows]

"""Where question-and-answer rows come from: the hub, files, or a function of the user's."""

import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import datasets

from arealite.utils.files import FileError, reading

SUFFIXES = (".jsonl", ".json", ".parquet")
ACCEPTED = (
    "'gsm8k', a .jsonl, .json or .parquet file with the columns question and answer, a folder of such files, "
    "'FILE.py:FUNCTION?option=value', or 'hf-dataset://org/name/file/in/the/repository.jsonl'"
)
_HUB_SCHEME = "hf-dataset://"
_HUB_FILE = re.compile(rf"{_HUB_SCHEME}([^/]+/[^/]+)/(.+)")
_FUNCTION = re.compile(r"(.+\.py):(\w+)(?:\?(.*))?")


def read_rows(path: str, split: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a source in its order, with the texts `question` and `answer`."""
    local = Path(path).expanduser()
    rows: list[Any]
    if path in ("gsm8k", "openai/gsm8k"):
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split).to_list()
    elif found := _FUNCTION.fullmatch(path):
        rows = _call(found[1], found[2], found[3] or "", split, seed)
    elif found := _HUB_FILE.fullmatch(path):
        rows = datasets.load_dataset(found[1], data_files=found[2], split="train").to_list()
    elif path and local.exists():
        local = _file_of_split(local, split) if local.is_dir() else local
        with reading(local):
            path, rows = str(local), _read_file(local)
    elif path.endswith(SUFFIXES) and not path.startswith(_HUB_SCHEME):
        raise ValueError(f"dataset file must exist: got {path!r}, which does not. Correct train_dataset.path.")
    else:
        raise ValueError(f"dataset path must be {ACCEPTED}: got {path!r}, which is none of them. Correct it.")
    if not rows:
        raise ValueError(f"dataset {path} must have rows: got none. Check the path.")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or row.get("question") is None or row.get("answer") is None:
            got = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"every row of {path} must have the columns question and answer: got {got} in row {index}. "
                "Rename the columns or drop the row."
            )
    return [{**row, "question": str(row["question"]), "answer": str(row["answer"])} for row in rows]


def _call(file: str, name: str, query: str, split: str, seed: int) -> Any:
    """Call `name(split, seed=seed, **options)` of a Python file; options of the query are text."""
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
    return function(split, seed=seed, **options)


def _file_of_split(folder: Path, split: str) -> Path:
    """Return the one file that is named after the split (`train.jsonl`, `my_train.parquet`)."""
    found = [file for file in folder.iterdir() if file.suffix in SUFFIXES and split in file.stem]
    if len(found) != 1:
        names = sorted(file.name for file in folder.iterdir())
        raise ValueError(
            f"dataset folder {folder} must hold one {'/'.join(SUFFIXES)} file with {split!r} in its name: "
            f"got {names}. Give the path of the file."
        )
    return found[0]


def _read_file(path: Path) -> Any:
    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path)).to_list()
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            got = type(rows).__name__
            raise FileError(f"{path} must hold a JSON list of objects: got {got}. Use .jsonl for lines.")
        return rows
    if path.suffix != ".jsonl":
        raise FileError(f"dataset file must end in {', '.join(SUFFIXES)}: got {path}. Convert it.")
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise FileError(f"{path}:{number} must be one JSON object per line: {error}. Fix the line.") from error
    return rows

"""`arealite tiny-model`: a tokenizer fitted to a corpus and a model with random weights, for smoke runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from arealite.api.errors import ConfigError
from arealite.dataset import get_custom_dataset
from arealite.utils.tiny_model import make_tiny_model

_NUM_STORIES = 3000


def write_tiny_model(
    *, out: str | Path, corpus: str | Path | None, seed: int, tie: bool = True, max_position: int = 2048
) -> Path:
    """Write the model to `out`; without a corpus its tokenizer is fitted to the built-in story problems."""
    if Path(out).is_file():
        raise ConfigError(f"--out must be a folder: got {out}, which is a file. Choose another.")
    disable_progress_bar()
    texts = _stories(seed) if corpus is None else _texts(Path(corpus))
    return make_tiny_model(out, texts, seed=seed, tie=tie, max_position=max_position)


def _stories(seed: int) -> Iterator[str]:
    for row in get_custom_dataset(f"story?train={_NUM_STORIES}", type="rl", split="train", seed=seed):
        yield row["question"]
        yield row["answer"]


def _texts(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, or the string values of the objects of a jsonl file."""
    if not path.is_file():
        raise ConfigError(f"--corpus must be a text or jsonl file: got {path}, which does not exist. Correct it.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if path.suffix != ".jsonl":
                yield line
            elif line.strip():
                yield from _strings(line, f"{path}:{number}")


def _strings(line: str, place: str) -> list[str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} must be one JSON object: {error}. Fix the line.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be one JSON object: got {type(row).__name__}. Fix the line.")
    return [value for value in row.values() if isinstance(value, str)]

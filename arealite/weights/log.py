"""`weights.jsonl` of a run folder: the fingerprint of the trainer's parameters as each version was published.

The number of threads is noted too, as sums in another order have other last bits.

Invariant: versions rise from line to line. A version that is published again, because the run went back to a
checkpoint or began anew, replaces its line and all later ones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from arealite.api.cli_args import InferenceEngineConfig

_NAME = "weights.jsonl"


def note_weights(config: InferenceEngineConfig, version: int, fingerprint: str) -> None:
    """Write the line of a version; a run without a folder has no log."""
    if not config.fileroot:
        return
    path = Path(config.fileroot) / config.experiment_name / config.trial_name / _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _text(path)
    earlier = "".join(line for line in _lines(text) if json.loads(line)["version"] < version)
    if earlier != text:
        unfinished = path.with_name(f".{_NAME}.unfinished")
        unfinished.write_text(earlier, encoding="utf-8")
        os.replace(unfinished, path)
    with path.open("a", encoding="utf-8") as file:
        line = {"version": version, "fingerprint": fingerprint, "threads": torch.get_num_threads()}
        file.write(json.dumps(line) + "\n")


def read_weights(folder: str | Path) -> dict[int, str]:
    """Return the fingerprint of every version in a run folder."""
    return {row["version"]: row["fingerprint"] for row in _rows(folder)}


def threads_of(folder: str | Path, version: int) -> int:
    """Return the number of threads of the trainer that published a version."""
    return next(int(row["threads"]) for row in _rows(folder) if row["version"] == version)


def _rows(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(_text(Path(folder) / _NAME))]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _lines(text: str) -> list[str]:
    """Return the whole lines; a last one that a crash cut off is no line."""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

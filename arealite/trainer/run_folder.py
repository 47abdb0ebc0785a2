"""The folder of a run and how files appear in it: complete, under their final name, or not at all.

A run that goes on from step N first undoes what it told of steps from N on: see `undo_from`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from arealite.utils.disk import writing


class NamesRun(Protocol):
    """Config blocks that know which run they belong to."""

    experiment_name: str
    trial_name: str
    fileroot: str


def run_folder(config: NamesRun) -> Path:
    """Return `<fileroot>/<experiment>/<trial>`; nothing is created."""
    return Path(config.fileroot) / config.experiment_name / config.trial_name


def write_text(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with writing(path):
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)


def publish_folder(unfinished: Path, path: Path) -> None:
    """Give a finished folder its final name, in place of one that has it."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    unfinished.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`; a last line cut off by a crash is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def config_of_step(folder: Path, step: int) -> Path:
    """Return the file with the config under which a step was trained: `config.yaml`, or that of an earlier process.

    `config_until_<S>.yaml` holds that of the steps before S, when a run went on from a checkpoint with another one.
    """
    later = [end for end in _ends_of_configs(folder) if end > step]
    return folder / (f"config_until_{min(later)}.yaml" if later else "config.yaml")


def write_config(folder: Path, text: str, *, start_step: int) -> None:
    """Write the config of the steps from `start_step` on, and keep that of those before if it is another one."""
    earlier = config_of_step(folder, start_step - 1)
    before = earlier.read_text(encoding="utf-8") if start_step > 0 and earlier.exists() else text
    for end in _ends_of_configs(folder):
        if end >= start_step:
            (folder / f"config_until_{end}.yaml").unlink()
    if before != text:
        write_text(folder / f"config_until_{start_step}.yaml", before)
    write_text(folder / "config.yaml", text)


def _ends_of_configs(folder: Path) -> list[int]:
    return [int(path.stem.rpartition("_")[2]) for path in folder.glob("config_until_*.yaml")]


def undo_from(folder: Path, step: int) -> None:
    """Forget what a run told of step `step` and later ones, and of its end: they are about to be done again.

    Its rollouts are the business of the rollout engine, its checkpoints of `recover`.
    """
    rows = [row for row in read_rows(folder) if row["step"] < step]
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for name in ("summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)


def summarize(rows: list[dict[str, Any]], *, max_head_offpolicyness: int | None) -> dict[str, Any]:
    """Return a run in a few numbers; what its rows do not tell is left out."""
    summary: dict[str, Any] = {
        "steps": sum("optim/grad_norm" in row for row in rows),
        "wall_s": sum(_values(rows, "time/step_s")),
    }
    if trained := _values(rows, "perf/trained_tokens"):
        summary["trained_tokens"] = int(sum(trained))
    if generated := _values(rows, "rollout/generated_tokens"):
        summary["generated_tokens"] = int(generated[-1])
    if staleness := _values(rows, "staleness/max"):
        summary |= {"staleness_max": int(max(staleness)), "max_head_offpolicyness": max_head_offpolicyness}
    for name in ("accuracy", "answer_tokens"):
        if values := _values(rows, f"eval/{name}"):
            summary |= {f"{name}_before": values[0], f"{name}_after": values[-1]}
    return summary


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]

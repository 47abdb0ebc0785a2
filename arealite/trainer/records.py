"""Records of a run's steps: configs, metrics and summary. A run that resumes drops those of steps it redoes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arealite.api.run_folder import RunFolder, numbered
from arealite.utils.files import read_jsonl, reading, write_atomically


def config_of_step(run: RunFolder, step: int) -> Path:
    """Return the file with the config under which a step was trained: `config.yaml`, or that of an earlier process.

    `config_until_<S>.yaml` holds that of the steps before S, when a run resumed from a checkpoint with another one.
    """
    earlier = numbered(run.path, "config_until_", ".yaml")
    return next((path for end, path in earlier.items() if end > step), run.config)


def write_config(run: RunFolder, text: str, *, start_step: int) -> None:
    """Write the config of the steps from `start_step` on, and keep a different one of the steps before."""
    earlier = config_of_step(run, start_step - 1)
    before = earlier.read_text(encoding="utf-8") if start_step > 0 and earlier.exists() else text
    for end, path in numbered(run.path, "config_until_", ".yaml").items():
        if end >= start_step:
            path.unlink()
    if before != text:
        write_atomically(run.path / f"config_until_{start_step}.yaml", before, mode=0o600)
    write_atomically(run.config, text, mode=0o600)


def undo_from(run: RunFolder, step: int) -> None:
    """Drop metrics and summaries from step `step` on; those steps will be redone.

    Rollouts belong to the rollout engine, checkpoints to `recover`.
    """
    with reading(run.metrics):
        rows = [row for row in read_jsonl(run.metrics) if row["step"] < step]
    write_atomically(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    for path in (run.summary, run.report):
        path.unlink(missing_ok=True)


def summarize(rows: list[dict[str, Any]], *, max_head_offpolicyness: int | None) -> dict[str, Any]:
    """Summarize a run in a few numbers, as far as its rows have them."""
    summary: dict[str, Any] = {
        "steps": sum("optim/grad_norm" in row or "value/grad_norm" in row for row in rows),
        "wall_s": sum(_values(rows, "time/step_s")),
    }
    if trained := _values(rows, "perf/trained_tokens"):
        summary["trained_tokens"] = int(sum(trained))
    if generated := _values(rows, "rollout/generated_tokens"):
        summary["generated_tokens"] = int(generated[-1])
    if staleness := _values(rows, "staleness/max"):
        summary |= {"staleness_max": int(max(staleness)), "max_head_offpolicyness": max_head_offpolicyness}
    for name, key in ((score_name(rows), "score"), ("completion_tokens", "eval/completion_tokens")):
        if values := _values([row | {"score": score(row)} for row in rows], key):
            summary |= {f"{name}_before": values[0], f"{name}_after": values[-1]}
    return summary


def score(row: Mapping[str, Any], end: str = "") -> float | None:
    """Return the accuracy or reward of the evaluation in a row, or an end of its interval (`_low`, `_high`)."""
    return row.get(f"eval/accuracy{end}", row.get(f"eval/reward{end}"))


def score_name(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the scores of a run are called: one evaluation with another reward than 0 and 1 names all."""
    return "reward" if any("eval/reward" in row for row in rows) else "accuracy"


def scores_of_steps(rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> dict[int, float]:
    """Return the score of the model after each step: accuracy, reward, or minus the loss, of the last evaluation.

    An evaluation at the top of step N + 1 measures the weights after step N. Mean rewards over different prompts can't
    be compared: those without the prompts that failed are no score. An accuracy has counted them as wrong.
    """
    scores: dict[int, float] = {}
    for row in rows:
        value = score(row)
        if value is None and row.get("eval/loss") is not None:
            value = -row["eval/loss"]
        if value is not None and not ("eval/reward" in row and row.get("eval/num_failed")):
            scores |= {step: value for step in steps if row["step"] <= step + 1}
    return scores


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]

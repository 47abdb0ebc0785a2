"""What the rows of `metrics.jsonl` say of a run: its summary, and the scores of its evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any


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

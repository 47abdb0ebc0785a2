"""What the rows of `metrics.jsonl` say of a run: its summary, and the scores of its evaluations."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OTHER_REWARDS = "reward/other_max"  # 1 once a reward of the run was neither 0 nor 1
_SCORED = ("eval", "greedy", "sampled")
_OF_RIGHT_OR_WRONG = re.compile(rf"({'|'.join(_SCORED)})/(accuracy|pass@\d+)(_low|_high)?")

_OF_STEPS = ("optim/grad_norm", "value/grad_norm", "reward/mean", "sft/loss")


def has_other_rewards(row: Mapping[str, Any]) -> bool:
    """Tell whether a row knows of a reward that is neither 0 nor 1, by which no score of its run is an accuracy."""
    scored = [name for name in _SCORED if f"{name}/reward" in row]
    return bool(row.get(OTHER_REWARDS)) or any(f"{name}/accuracy" not in row for name in scored)


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step without accuracies and pass@k, if they know of other rewards than 0 and 1."""
    if not has_other_rewards(metrics):
        return dict(metrics)
    kept = {key: value for key, value in metrics.items() if not _OF_RIGHT_OR_WRONG.fullmatch(key)}
    return kept | {OTHER_REWARDS: 1.0}


def summarize(rows: list[dict[str, Any]], *, max_head_offpolicyness: int | None) -> dict[str, Any]:
    """Summarize a run in a few numbers, as far as its rows have them."""
    summary: dict[str, Any] = {"steps": sum(map(is_of_training, rows)), "wall_s": sum(_values(rows, "time/step_s"))}
    if trained := _values(rows, "perf/trained_tokens"):
        summary["trained_tokens"] = int(sum(trained))
    if generated := _values(rows, "rollout/generated_tokens"):
        summary["generated_tokens"] = int(generated[-1])
    if staleness := _values(rows, "staleness/max"):
        summary |= {"staleness_max": int(max(staleness)), "max_head_offpolicyness": max_head_offpolicyness}
    called = score_name(rows)
    scores = [value for row in rows if (value := score(row, called)) is not None]
    for name, values in ((called, scores), ("completion_tokens", _values(rows, "eval/completion_tokens"))):
        if values:
            summary |= {f"{name}_before": values[0], f"{name}_after": values[-1]}
    return summary


def is_of_training(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is that of a step: the row after the last one has an evaluation only."""
    return not row.keys().isdisjoint(_OF_STEPS)


def score(row: Mapping[str, Any], name: str, end: str = "") -> float | None:
    """Return the score of the evaluation in a row by its `score_name`, or an end of its interval (`_low`, `_high`)."""
    return row.get(f"eval/{name}{end}", row.get(f"eval/accuracy{end}"))


def score_name(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the scores of a run are called: one reward that is neither 0 nor 1, trained on or not, names all."""
    return "reward" if any(map(has_other_rewards, rows)) else "accuracy"


def scores_of_steps(rows: Iterable[Mapping[str, Any]], steps: Sequence[int]) -> dict[int, float]:
    """Return the score of the model after each step: accuracy, reward, or minus the loss, of the last evaluation.

    An evaluation at the top of step N + 1 measures the weights after step N. Mean rewards over different prompts can't
    be compared: those without the prompts that failed are no score. An accuracy has counted them as wrong.
    """
    scores: dict[str, dict[int, float]] = {"accuracy": {}, "reward": {}}
    called = "accuracy"  # as `score_name` of all rows says, which are read once and not kept
    for row in rows:
        called = "reward" if has_other_rewards(row) else called
        for name in scores:
            value = score(row, name)
            if value is None and row.get("eval/loss") is not None:
                value = -row["eval/loss"]
            if value is not None and not (name == "reward" and row.get("eval/num_failed")):
                scores[name] |= {step: value for step in steps if row["step"] <= step + 1}
    return scores[called]


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]

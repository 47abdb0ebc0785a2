"""The summary of a run, finished or not: title, headline numbers, charts, the table of an evaluation.

Parts whose file is missing are left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from arealite.api.cli_args import SFTConfig, masked
from arealite.api.collapse import first_warning
from arealite.api.config.experiment import EXPERIMENTS
from arealite.api.run_folder import RunFolder
from arealite.api.run_metrics import score, summarize
from arealite.utils.files import is_locked, reading, require_object
from arealite.viewer.charts import charts, evaluation_charts
from arealite.viewer.plain import readable

FILES_OF_RUNS = ("metrics.jsonl", "config.yaml", "run.json")
Card = tuple[str, str, str]  # label, value and note
_SAMPLINGS = {"greedy": "Greedy", "sampled": "Sampled, mean"}
_TABLE_HEADS = ("", "score", "95 % interval", "tokens", "truncated", "samples", "failed prompts")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return any((folder / name).exists() for name in FILES_OF_RUNS)


def state_of(run: RunFolder) -> str:
    """Return the state of a run; its locks, which the kernel frees, distinguish a live run from a dead one."""
    with reading(run.summary):
        if run.is_finished:
            return "finished"
    if is_locked(run.trainer_lock):
        return "training"
    if is_locked(run.launcher_lock):
        return "running"
    return "stopped" if run.summary.exists() else "ended early"


def score_in_words(row: dict[str, Any], name: str) -> str:
    """Return the score of the evaluation in a row with its name, or an empty text."""
    if (value := score(row, name)) is not None:
        return f"{name} {value:{'.1%' if name == 'accuracy' else '.3g'}}"
    return f"loss {row['eval/loss']:.3g}" if row.get("eval/loss") is not None else ""


def describe(run: RunFolder, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run and of its `rows` of metrics, as plain values. Raises FileError."""
    with reading(run.config, yaml.YAMLError):
        config_text = text_of(run.config)
        config = require_object(yaml.safe_load(config_text) or {})
        if (public := masked(config_text)) != config:
            config, config_text = public, yaml.safe_dump(public, sort_keys=False, allow_unicode=True)
        bound = (config.get("rollout") or {}).get("max_head_offpolicyness")
        folder = run.path.resolve()
        lead = _lead(config)
        title = f"{config.get('experiment_name', folder.parent.name)} / {config.get('trial_name', folder.name)}"
    with reading(run.metrics):
        summary = summarize(rows, max_head_offpolicyness=bound)
        cards, shown = _cards(rows, summary), charts(rows, staleness_bound=bound)
    table = list[tuple[str, ...]]()
    with reading(run.summary):
        stored = require_object(json.loads(text_of(run.summary) or "{}"))
        if rows and "sampled/num_samples" in rows[-1]:  # an evaluation without training
            cards, table = [], _evaluation_table(rows[-1])
            shown = evaluation_charts(rows[-1], stored.get("solved") or [])
    if (state := state_of(run)) != "finished" and not run.summary.exists():
        lead = f"{lead} ({state}: {summary['steps']} steps so far)".strip()
    if warning := first_warning(rows):
        lead += f"; step {warning[0]}: {warning[1]}"
    if run.trace.exists():
        lead += "; ui.perfetto.dev shows what its processes did, from trace.json.gz"
    return {
        "title": readable(title),
        "lead": lead,
        "cards": cards,
        "table": table,
        "charts": shown,
        "config": config_text,
    }


def text_of(path: Path) -> str:
    """Return the text of a file, empty if it is missing."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _lead(config: dict[str, Any]) -> str:
    """Return a sentence that names algorithm, model, data and allocation."""
    model = (config.get("actor") or config.get("model") or {}).get("path")
    data_type = str((config.get("train_dataset") or {}).get("type"))
    if "pass_at_k" in config:
        kind = "Evaluation"
    elif actor := config.get("actor"):
        kind = "Distillation" if config.get("teacher") else actor.get("algorithm") or "GRPO"
    else:
        kind = next((cls.TITLE for cls in EXPERIMENTS if data_type == cls.DATA_TYPE), SFTConfig.TITLE)
    data = next(filter(None, ((config.get(f"{name}_dataset") or {}).get("path") for name in ("train", "valid"))), None)
    words = [
        f"{kind} of {model}" if model else None,
        f"on {data}" if data else None,
        f"with {config['allocation_mode']}" if config.get("allocation_mode") else None,
    ]
    return " ".join(word for word in words if word)


def _cards(rows: list[dict[str, Any]], summary: dict[str, Any]) -> list[Card]:
    """Return the headline numbers of the run."""
    cards = []
    if name := next((one for one in ("accuracy", "reward") if f"{one}_before" in summary), ""):
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        form, change = ".3g", f"{after - before:+.3g}"
        if name == "accuracy":
            form, change = ".1%", f"{100 * (after - before):+.1f} points"
        last: dict[str, Any] = next((row for row in reversed(rows) if score(row, name) is not None), {})
        interval = _interval(score(last, name, "_low"), score(last, name, "_high"), form)
        note = f"{change}; 95 % interval {interval}" if interval else change
        cards.append((f"Held-out {name}", f"{before:{form}} → {after:{form}}", note))
    for label, key in (("Reward", "reward/mean"), ("Loss", "sft/loss"), ("Held-out loss", "eval/loss")):
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            cards.append((label, f"{values[0]:.3g} → {values[-1]:.3g}", "first and last step"))
    steps_s = sum(row.get("time/step_s") or 0.0 for row in rows)
    if summary["steps"]:
        cards.append(("Steps", f"{summary['steps']:,}", f"{_duration(steps_s / summary['steps'])} each"))
        cards.append(("Wall time", _duration(steps_s), "first step to last"))
    if summary.get("trained_tokens"):
        processed = sum(row.get("perf/processed_tokens") or 0.0 for row in rows)
        note = f"{processed / steps_s:,.0f} processed per second"
        cards.append(("Trained tokens", f"{summary['trained_tokens']:,}", note))
    if "staleness_max" in summary:
        bound = summary["max_head_offpolicyness"]
        note = "weight versions" if bound is None else f"versions, at most {bound}"
        cards.append(("Largest staleness", str(summary["staleness_max"]), note))
    return cards


def _duration(seconds: float) -> str:
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _evaluation_table(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table, its heads first."""
    lines: list[tuple[str, ...]] = [_TABLE_HEADS]
    for name, label in _SAMPLINGS.items():
        kind, form = ("accuracy", ".1%") if f"{name}/accuracy" in row else ("reward", ".3g")
        if f"{name}/{kind}" in row:
            truncated = row.get(f"{name}/truncated_ratio")  # a user's workflow may not mark it
            lengths = f"{row[f'{name}/completion_tokens']:,.1f}", "" if truncated is None else f"{truncated:.1%}"
            counts = (f"{int(row[f'{name}/{key}']):,}" for key in ("num_samples", "num_failed"))
            lines.append((f"{label} {kind}", *_value(row, f"{name}/{kind}", form), *lengths, *counts))
    for key in row:
        if key.startswith("sampled/pass@") and not key.endswith(("_low", "_high")):
            lines.append((key.removeprefix("sampled/"), *_value(row, key, ".1%"), "", "", "", ""))
    return lines


def _value(row: Mapping[str, Any], key: str, form: str) -> tuple[str, str]:
    """Return a score and its interval as texts."""
    return f"{row[key]:{form}}", _interval(row.get(f"{key}_low"), row.get(f"{key}_high"), form)


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f"{low:{form}} to {high:{form}}"

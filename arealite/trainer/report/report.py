"""`report.html`: a run on one page that needs nothing but itself, made of the files of its run folder.

Works for any run, finished or not: what a missing file would have told is left out. Texts of models and data sets are
data to the page, never markup.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

import yaml
from plotly.offline import get_plotlyjs

from arealite.api.cli_args import masked
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder, numbered
from arealite.trainer.records import score, summarize
from arealite.trainer.report.charts import charts, evaluation_charts
from arealite.trainer.report.evaluation import evaluation_cards, evaluation_table, is_evaluation
from arealite.trainer.report.samples import before_after, examples, trajectories
from arealite.utils.files import read_jsonl, reading, require_object, write_atomically

_PAGE = Path(__file__).with_name("page")
_FILES_OF_RUNS = ("metrics.jsonl", "config.yaml", "run.json")


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run folder and return its path."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ConfigError(f"the run folder must exist: got {folder}. Pass <fileroot>/<experiment>/<trial>.")
    if not any((folder / name).exists() for name in _FILES_OF_RUNS):
        raise ConfigError(
            f"a run folder must hold {' or '.join(_FILES_OF_RUNS)}: got none in {folder}. "
            "Pass <fileroot>/<experiment>/<trial>."
        )
    run = RunFolder(folder)
    write_atomically(run.report, _render(run))
    return run.report


def _render(run: RunFolder) -> str:
    with reading(run.config, yaml.YAMLError):
        config_text = _read(run.config)
        config = require_object(yaml.safe_load(config_text) or {})
        if (public := masked(config_text)) != config:
            config, config_text = public, yaml.safe_dump(public, sort_keys=False, allow_unicode=True)
        bound = (config.get("rollout") or {}).get("max_head_offpolicyness")
        folder = run.path.resolve()
        title = f"{config.get('experiment_name', folder.parent.name)} / {config.get('trial_name', folder.name)}"
    with reading(run.metrics):
        rows = read_jsonl(run.metrics)
        summary = summarize(rows, max_head_offpolicyness=bound)
        cards, shown, table = _cards(rows, summary), charts(rows, staleness_bound=bound), ""
    with reading(run.summary):
        summary |= require_object(json.loads(_read(run.summary) or "{}"))
        cards = _cards(rows, summary)
        if rows and is_evaluation(rows[-1]):
            cards, table = evaluation_cards(rows[-1], summary), evaluation_table(rows[-1])
            shown = evaluation_charts(rows[-1], summary.get("solved") or [])
    data = {
        "charts": shown,
        "beforeAfter": examples(run.rollouts) or before_after(run.rollouts),
        "trajectories": trajectories(run.rollouts),
        "numStoredSteps": len(numbered(run.rollouts, "step_")),
    }
    parts = {
        "title": html.escape(title),
        "lead": html.escape(_lead(config, summary, is_finished=run.summary.exists())),
        "cards": "\n".join(_card(label, value, note) for label, value, note in cards),
        "table": table,
        "config": html.escape(config_text),
        "hidden_config": "" if config_text else "hidden",
        # Inside a script element only "<" could end the data.
        "data": json.dumps(data).replace("<", "\\u003c"),
        "css": _read(_PAGE / "page.css"),
        "js": _read(_PAGE / "page.js"),
        "plotly": get_plotlyjs(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read(_PAGE / "page.html"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _lead(config: dict[str, Any], summary: dict[str, Any], *, is_finished: bool) -> str:
    """Return one sentence on what was run."""
    model = (config.get("actor") or config.get("model") or {}).get("path")
    data_type = str((config.get("train_dataset") or {}).get("type"))
    if "pass_at_k" in config:
        kind = "Evaluation"
    elif actor := config.get("actor"):
        kind = "Distillation" if config.get("teacher") else actor.get("algorithm") or "GRPO"
    else:
        kind = {"dpo": "Preference optimization", "rw": "Reward modelling"}.get(data_type, "Supervised fine-tuning")
    data = next(filter(None, ((config.get(f"{name}_dataset") or {}).get("path") for name in ("train", "valid"))), None)
    words = [
        f"{kind} of {model}" if model else None,
        f"on {data}" if data else None,
        f"with {config['allocation_mode']}" if config.get("allocation_mode") else None,
    ]
    sentence = " ".join(word for word in words if word)
    return sentence if is_finished else f"{sentence} (not finished: {summary['steps']} steps so far)".strip()


def _cards(rows: list[dict[str, Any]], summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return label, value and note of the headline numbers that the run has."""
    cards = []
    if "accuracy_before" in summary:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        interval = _interval(rows, ".1%")
        cards.append(
            ("Held-out accuracy", f"{before:.1%} → {after:.1%}", f"{100 * (after - before):+.1f} points{interval}")
        )
    elif "reward_before" in summary:
        before, after = summary["reward_before"], summary["reward_after"]
        note = f"{after - before:+.3g}{_interval(rows, '.3g')}"
        cards.append(("Held-out reward", f"{before:.3g} → {after:.3g}", note))
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


def _interval(rows: list[dict[str, Any]], form: str) -> str:
    """Return the interval of the last evaluation in words."""
    last: dict[str, Any] = next((row for row in reversed(rows) if score(row) is not None), {})
    low, high = score(last, "_low"), score(last, "_high")
    return "" if low is None or high is None else f"; 95 % interval {low:{form}} to {high:{form}}"


def _card(label: str, value: str, note: str) -> str:
    label, value, note = (html.escape(text) for text in (label, value, note))
    return f'<div class="card"><dt>{label}</dt><dd>{value}</dd><p>{note}</p></div>'


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

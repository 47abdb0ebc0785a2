"""The numbers of an evaluation on its report: cards with the headline, and a table."""

from collections.abc import Mapping
from typing import Any

Card = tuple[str, str, str]  # label, value and note
_NAMES = {"greedy": "Greedy", "sampled": "Sampled, mean"}
_HEADS = ("", "score", "95 % interval", "tokens", "truncated", "samples", "failed prompts")


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Tell whether a row of metrics is that of an evaluation without training."""
    return "sampled/num_samples" in row


def evaluation_cards(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Card]:
    """Return the scores, and how many prompts and samples stand behind them."""
    scores = [(label.partition(",")[0], *_score(row, name)) for name, label in _NAMES.items()]
    cards = [(f"{label} {kind}", value, f"95 % interval {interval}") for label, kind, value, interval in scores if kind]
    if most := max((int(key.partition("@")[2]) for key in row if _is_pass(key)), default=0):
        value, interval = _interval(row, f"sampled/pass@{most}", ".1%")
        cards.append((f"pass@{most}", value, f"95 % interval {interval}"))
    if solved := summary.get("solved"):
        cards.append(("Solved by a sample", f"{sum(solved[1:]):,} of {sum(solved):,}", f"{solved[-1]:,} by all"))
    cards.append(
        ("Samples", f"{int(row['sampled/num_samples']):,}", f"{int(row['sampled/num_failed'])} prompts failed")
    )
    return cards


def evaluation_table(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table, its heads first."""
    lines: list[tuple[str, ...]] = [_HEADS]
    for name, label in _NAMES.items():
        kind, value, interval = _score(row, name)
        if kind:
            cut_off = row.get(f"{name}/truncated_ratio")  # of a workflow that tells
            lengths = f"{row[f'{name}/completion_tokens']:,.1f}", "" if cut_off is None else f"{cut_off:.1%}"
            counts = (f"{int(row[f'{name}/{key}']):,}" for key in ("num_samples", "num_failed"))
            lines.append((f"{label} {kind}", value, interval, *lengths, *counts))
    for key in filter(_is_pass, row):
        lines.append((key.removeprefix("sampled/"), *_interval(row, key, ".1%"), "", "", "", ""))
    return lines


def _is_pass(key: str) -> bool:
    return key.startswith("sampled/pass@") and not key.endswith(("_low", "_high"))


def _score(row: Mapping[str, Any], name: str) -> tuple[str, str, str]:
    """Return what the score is called (empty if there is none), its value, and its interval."""
    kind = next((one for one in ("accuracy", "reward") if f"{name}/{one}" in row), "")
    return kind, *(_interval(row, f"{name}/{kind}", ".1%" if kind == "accuracy" else ".3g") if kind else ("", ""))


def _interval(row: Mapping[str, Any], key: str, form: str) -> tuple[str, str]:
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    return f"{row[key]:{form}}", "" if low is None or high is None else f"{low:{form}} to {high:{form}}"

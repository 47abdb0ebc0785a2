"""The console's line per step: columns in a fixed order, numbers as in `metrics.jsonl`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TRAINING_PHASES = ("time/logprobs_s", "time/update_s", "time/train_s")
"""Timers that add up to the column `train`."""

_UNITS = ((1e3, "k"), (1e6, "M"), (1e9, "G"))


def compact(value: float) -> str:
    """Render a number in at most seven characters: 0.413, 12.5, 1.2e-3, 21.3k."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-2:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size < 9.9995:
        return f"{value:.3f}"
    if size < 999.95:
        return f"{value:.1f}"
    unit, letter = next((unit, letter) for unit, letter in _UNITS if size < 999.95 * unit or letter == "G")
    return f"{value / unit:.1f}{letter}"


def _seconds(value: float) -> str:
    return f"{value:.1f}s"


def _sum(*keys: str) -> Callable[[Mapping[str, float]], float | None]:
    def value(metrics: Mapping[str, float]) -> float | None:
        found = [metrics[key] for key in keys if key in metrics]
        return sum(found) if found else None

    return value


def _first(*keys: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda metrics: next((metrics[key] for key in keys if key in metrics), None)


@dataclass(frozen=True)
class Column:
    """One number of the line; columns of one group share a cell."""

    label: str
    value: Callable[[Mapping[str, float]], float | None]
    width: int
    render: Callable[[float], str] = compact
    group: str = ""


COLUMNS = (
    Column("reward", _first("reward/mean"), 6),
    Column("loss", _first("policy/loss", "sft/loss"), 6, lambda value: f"{value:.3f}"),
    Column("kl", _first("policy/approx_kl"), 6),
    Column("mismatch_kl", _first("policy/mismatch_kl"), 6),
    Column("staleness", _first("staleness/mean"), 3, lambda value: f"{value:.1f}"),
    Column("rollout", _first("time/rollout_s"), 5, _seconds, group="time"),
    Column("train", _sum(*TRAINING_PHASES), 5, _seconds, group="time"),
    Column("tok/s", _first("perf/tokens_per_s"), 5),
    Column("eval", _first("eval/accuracy", "eval/loss"), 6),
)


class StepLine:
    """Renders steps; a column appears with its first value, then keeps its place and shows `-` where there is none.

    A row that trained nothing (a last evaluation) shows what it has.
    """

    def __init__(self, *, total_steps: int, staleness_bound: int | None) -> None:
        self._total_steps = total_steps
        self._staleness_bound = staleness_bound
        self._seen: set[str] = set()

    def render(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the line of one step."""
        cells = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"]
        group = ""
        has_trained = any(key.startswith("optim/") for key in metrics)
        for column in COLUMNS:
            value = column.value(metrics)
            if value is not None:
                self._seen.add(column.label)
            elif column.label == "eval" or column.label not in self._seen or not has_trained:
                continue
            text = self._cell(column, value)
            if group and column.group == group:
                cells[-1] += f" {text}"
            else:
                cells.append(text)
            group = column.group
        return " | ".join(cells)

    def _cell(self, column: Column, value: float | None) -> str:
        number = "-" if value is None else column.render(value)
        if column.label == "staleness" and self._staleness_bound is not None and value is not None:
            number += f"/{self._staleness_bound}"
        if column.label == "tok/s":
            return f"{number.rjust(column.width)} {column.label}"
        return f"{column.label} {number.rjust(column.width)}"

"""The console's line per step: columns in a fixed order, numbers as in `metrics.jsonl`, and what bounded the step.

A wait for a batch is divided among what episodes did meanwhile (`rollout/event_loop.py`); the rest of the step is the
trainer's own.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arealite.api.config.experiment import EXPERIMENTS

_UNITS = ((1e3, "k"), (1e6, "M"), (1e9, "G"))


def compact(value: float) -> str:
    """Render a number in at most seven characters: 0.413, 12.5, 1.2e-3, 21.3k."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-2:
        return f"{value:.1e}".replace("e-0", "e-")
    if size < 9.9995:
        return f"{value:.3f}"
    if size < 999.95:
        return f"{value:.1f}"
    unit, letter = next((unit, letter) for unit, letter in _UNITS if size < 999.95 * unit or letter == "G")
    return f"{value / unit:.1f}{letter}"


@dataclass(frozen=True)
class Column:
    """A number of the line: the first of its metrics that a row has, or their sum. Columns of a group share a cell."""

    label: str
    keys: tuple[str, ...]
    width: int
    render: Callable[[float], str] = compact
    group: str = ""
    is_sum: bool = False


COLUMNS = (
    Column("reward", ("reward/mean",), 6),
    Column("loss", tuple(experiment.LOSS for experiment in EXPERIMENTS if experiment.LOSS), 6, "{:.3f}".format),
    Column("length", ("rollout/completion_tokens",), 5),
    Column("truncated", ("rollout/truncated_ratio",), 4, "{:.0%}".format),
    Column("mismatch_kl", ("policy/mismatch_kl",), 6),
    Column("staleness", ("staleness/mean",), 3, "{:.1f}".format),
    Column("rollout", ("time/rollout_s",), 5, "{:.1f}s".format, group="time"),
    Column("train", ("time/logprobs_s", "time/update_s", "time/train_s"), 5, "{:.1f}s".format, "time", is_sum=True),
    Column("processed", ("perf/tokens_per_s",), 7, lambda value: f"{compact(value)}/s"),
    Column("eval", ("eval/accuracy", "eval/reward"), 6),
    Column("eval", ("eval/loss",), 6),
    Column("greedy", ("greedy/accuracy", "greedy/reward"), 6),
    Column("sampled", ("sampled/accuracy", "sampled/reward"), 6),
)


_FIRST_TO_GO = ("mismatch_kl", "truncated", "processed", "loss", "length", "staleness", "verdict", "train")
"""Columns that a narrow terminal drops, in this order; `metrics.jsonl` has them."""


class StepLine:
    """Renders steps. A column appears with its first value, then keeps its place and shows `-` for a missing value.

    A row without training (a last evaluation) shows only its own values. If a line is wider than `width`, columns are
    dropped permanently.
    """

    def __init__(self, *, total_steps: int, staleness_bound: int | None, width: int) -> None:
        self._width = width
        self._hidden: set[str] = set()
        self._total_steps = total_steps
        self._staleness_bound = staleness_bound
        self._seen: set[str] = set()

    def render(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the line of one step."""
        line = self._line(step, metrics)
        for label in _FIRST_TO_GO:
            if len(line) > self._width:
                self._hidden.add(label)
                line = self._line(step, metrics)
        return line

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        cells = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"]
        group = ""
        has_trained = any(key.startswith(("optim/", "value/")) for key in metrics)
        for column in COLUMNS:
            values = [metrics[key] for key in column.keys if key in metrics]
            value = (sum(values) if column.is_sum else values[0]) if values else None
            if column.label in self._hidden:
                continue
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
        if "verdict" not in self._hidden and (bottleneck := verdict(metrics)):
            cells.append(bottleneck)
        return " | ".join(cells)

    def _cell(self, column: Column, value: float | None) -> str:
        number = "-" if value is None else column.render(value)
        if column.label == "staleness" and self._staleness_bound is not None and value is not None:
            number += f"/{self._staleness_bound}"
        return f"{column.label} {number.rjust(column.width)}"


_FULL = "wait/servers_full_s"
_OF_WAITS = {"wait/reward_s": "reward", "wait/workflow_s": "workflow"}
_NAMES = ("trainer", "rollout", "reward", "workflow", "weights")


def bounds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each part in the step, as `bound/<name>`; the shares add up to 1."""
    step_s, rollout_s = metrics.get("time/step_s", 0.0), metrics.get("time/rollout_s")
    if rollout_s is None or step_s <= 0:
        return {}
    parts_s = {name: metrics.get(key, 0.0) for key, name in _OF_WAITS.items()}
    if (waited_s := sum(parts_s.values())) > rollout_s:  # it has waits of the step before
        parts_s = {name: seconds * rollout_s / waited_s for name, seconds in parts_s.items()}
    parts_s["rollout"] = max(0.0, rollout_s - waited_s)
    parts_s["weights"] = metrics.get("time/weights_s", 0.0)
    parts_s["trainer"] = max(0.0, step_s - sum(parts_s.values()))
    whole_s = sum(parts_s.values())  # longer than the step if its parts overlap
    return {f"bound/{name}": parts_s[name] / whole_s for name in _NAMES}


def verdict(metrics: Mapping[str, float]) -> str | None:
    """Return the part with the largest share, such as `trainer-bound 61 %: update`; None without rollouts."""
    shares = {name: metrics[key] for name in _NAMES if (key := f"bound/{name}") in metrics}
    if not shares:
        return None
    name = max(shares, key=lambda name: shares[name])
    detail = ""
    if name == "trainer":
        detail = f": {_longest_phase(metrics)}"
    elif name == "rollout" and metrics.get(_FULL, 0.0) > metrics.get("wait/servers_s", 0.0):
        detail = ": servers full"
    elif name == "rollout" and metrics.get("wait/servers_s", 0.0) > 0:
        detail = ": servers"
    return f"{name}-bound {shares[name]:.0%}".replace("%", " %") + detail


def _longest_phase(metrics: Mapping[str, float]) -> str:
    not_its_own = ("time/step_s", "time/rollout_s", "time/weights_s")
    own = {key: value for key, value in metrics.items() if key.startswith("time/") and key not in not_its_own}
    own["other"] = metrics["time/step_s"] - sum(metrics.get(key, 0.0) for key in (*own, *not_its_own[1:]))
    return max(own, key=lambda key: own[key]).removeprefix("time/").removesuffix("_s")

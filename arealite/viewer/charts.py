"""The charts of the report: plain Plotly traces of the rows of `metrics.jsonl`; a chart without data is left out.

Colours are names of CSS variables (`--blue`), which the page resolves for its light and dark scheme.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from arealite.api.run_metrics import score, score_name

Row = dict[str, Any]
Chart = dict[str, Any]
Trace = dict[str, Any]

MAX_POINTS = 2000  # of a trace: a chart is less than half as many pixels wide
SMOOTH_FROM = 20  # points of a curve that also gets a moving mean
PHASES = ("time/rollout_s", "time/logprobs_s", "time/update_s", "time/weights_s", "time/eval_s", "time/save_s")
_WEIGHTS = (("time/weights_s", "--purple", "whole update"), ("weights/pause_s", "--orange", "generation held back"))
_SERVERS = (  # those with current weights, and those that have joined and left so far
    ("servers/live", "--green", "live"),
    ("servers/joined", "--blue", "joined"),
    ("servers/left", "--red", "left"),
)
_DISTANCES = (("policy/mismatch_kl", "--red", "mismatch_kl"), ("policy/approx_kl", "--blue", "approx_kl"))
COLOURS = ("--blue", "--green", "--orange", "--purple", "--red", "--teal")


def charts(rows: Sequence[Row], *, staleness_bound: int | None) -> list[Chart]:
    """Return the charts for which the rows have data, in reading order."""
    candidates = [
        _held_out(rows),
        chart("Reward", _smoothed(rows, "reward/mean", "--blue")),
        chart("Rewards by function", _of_functions(rows)),
        *(chart(key.removeprefix("workflow/"), _line(rows, key, "--teal")) for key in _keys(rows, "workflow/")),
        chart("Held-out loss", _evaluation(rows, "eval/loss", "--green")),
        chart("Loss", [*_smoothed(rows, "sft/loss", "--blue"), *_smoothed(rows, "policy/loss", "--blue")]),
        chart(
            "Completion length",
            [
                *_line(rows, "rollout/completion_tokens", "--blue", "training"),
                *_evaluation(rows, "eval/completion_tokens", "--green", "held-out"),
            ],
            unit="tokens",
        ),
        chart("Staleness", _staleness(rows, staleness_bound), unit="weight versions"),
        chart("Weight updates", _lines(rows, _WEIGHTS), unit="seconds"),
        chart("Servers", _lines(rows, _SERVERS)),
        chart("Time per step", _phases(rows), unit="seconds", barmode="stack", bargap=0),
        chart("Throughput", _smoothed(rows, "perf/tokens_per_s", "--teal"), unit="processed tokens per second"),
        chart(
            "Distance to the sampling policy",
            _lines(rows, _DISTANCES),
            exponentformat="e",  # Plotly writes 8e-14 as 80f
        ),
        chart("Clipped tokens", _line(rows, "policy/clip_ratio", "--orange"), tickformat=".2~%"),
        chart("Malformed calls", _malformed(rows), unit="calls per run"),
        chart("Entropy", _line(rows, "policy/entropy", "--purple"), unit="nats per token"),
        chart("Gradient norm", _line(rows, "optim/grad_norm", "--blue")),
    ]
    return [one for one in candidates if one["traces"]]


def _malformed(rows: Sequence[Row]) -> list[Trace]:
    """Draw the calls of tools that could not be read, once there were some, and their kinds."""
    names = sorted({name for row in rows for name in row if "/malformed_calls" in name and row[name]})
    kinds = [name.rpartition("malformed_calls")[2].lstrip("_") or "all" for name in names]
    colours = itertools.cycle(COLOURS)
    return [one for name, kind, colour in zip(names, kinds, colours) for one in _line(rows, name, colour, kind)]


def evaluation_charts(row: Row, solved: Sequence[int]) -> list[Chart]:
    """Return the charts of pass@k and of `solved`, the numbers of prompts with 0, 1, ... right samples."""
    ks = sorted(int(key.removeprefix("sampled/pass@")) for key in row if re.fullmatch(r"sampled/pass@\d+", key))
    if not ks:
        return []
    curve, low, high = ([row[f"sampled/pass@{k}{end}"] for k in ks] for end in ("", "_low", "_high"))
    points = {"type": "scatter", "x": ks}
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    traces = [
        points | edge | {"y": low, "showlegend": False},
        points | edge | {"y": high, "fill": "tonexty", "fillcolor": "--band", "name": "95 % interval"},
        points | _marked("--blue") | {"y": curve, "name": "pass@k"},
    ]
    if (greedy := row.get("greedy/accuracy")) is not None:
        line = {"color": "--green", "width": 2, "dash": "dash"}
        traces.append(points | {"mode": "lines", "y": [greedy] * len(ks), "name": "greedy", "line": line})
    ends = [math.log10(ks[0]) - 0.03, math.log10(ks[-1]) + 0.03]
    axis = {"title": {"text": "k samples", "standoff": 4}, "type": "log", "range": ends, "tickvals": ks, "ticktext": ks}
    size = len(solved) - 1
    bars = {"type": "bar", "x": [*range(size + 1)], "y": [*solved], "marker": {"color": "--blue"}, "name": "prompts"}
    of_all = {"title": {"text": f"right samples of {size}", "standoff": 4}, "range": [-0.6, size + 0.6]}
    return [
        chart("pass@k", traces, tickformat=".0%", xaxis=axis),
        chart("Prompts by right samples", [bars], unit="prompts", xaxis=of_all, bargap=0.15),
    ]


def chart(
    title: str, traces: list[Trace], *, unit: str = "", tickformat: str = "", exponentformat: str = "B", **layout: Any
) -> Chart:
    """Return a chart for the page, thinned to the resolution of a screen; `layout` is Plotly's."""
    axis = {"rangemode": "tozero", "exponentformat": exponentformat, "tickformat": tickformat}
    return {"title": title, "unit": unit, "traces": [*map(thinned, traces)], "layout": {"yaxis": axis, **layout}}


def _line(
    rows: Sequence[Row], key: str, colour: str, name: str = "", *, x: str = "step", **options: Any
) -> list[Trace]:
    """Draw a key of the rows; a null between values is a gap in the curve, and nulls alone give no curve."""
    known = [row for row in rows if key in row]
    if all(row[key] is None for row in known):
        return []
    points = {"x": [row.get(x, row["step"]) for row in known], "y": [row[key] for row in known]}
    trace = {"type": "scatter", "mode": "lines" if len(known) > 1 else "markers", **points, "name": name or key}
    return [trace | {"line": {"color": colour, "width": 2}, "marker": {"color": colour}} | options]


def _lines(rows: Sequence[Row], curves: Sequence[tuple[str, str, str]]) -> list[Trace]:
    """Draw several keys, each with its colour and name."""
    return [trace for curve in curves for trace in _line(rows, *curve)]


def _smoothed(rows: Sequence[Row], key: str, colour: str) -> list[Trace]:
    """Draw a curve; a long one also with a moving mean, which skips nulls."""
    raw = _line(rows, key, colour)
    if not raw or len(raw[0]["x"]) < SMOOTH_FROM:
        return raw
    xs, ys = raw[0]["x"], raw[0]["y"]
    window = max(3, len(xs) // 20)
    sums = [*itertools.accumulate((value or 0.0 for value in ys), initial=0.0)]
    counts = [*itertools.accumulate((value is not None for value in ys), initial=0)]
    starts = [max(0, end - window) for end in range(1, len(ys) + 1)]
    recent = [(sums[end] - sums[start], counts[end] - counts[start]) for end, start in enumerate(starts, start=1)]
    means = [total / count if count else None for total, count in recent]
    raw[0] |= {"opacity": 0.35, "line": {"color": colour, "width": 1}, "name": "each step"}
    mean = {"x": xs, "y": means, "name": f"mean of {window}"}
    return [*raw, {"type": "scatter", "mode": "lines", "line": {"color": colour, "width": 2.5}, **mean}]


def _evaluation(rows: Sequence[Row], key: str, colour: str, name: str = "") -> list[Trace]:
    return _line(rows, key, colour, name, x="eval/version", **_marked(colour))


def _marked(colour: str) -> Trace:
    return {"mode": "lines+markers", "line": {"color": colour, "width": 2.5}, "marker": {"color": colour, "size": 7}}


def _held_out(rows: Sequence[Row]) -> Chart:
    """Draw the score of each evaluation with its interval."""
    name = score_name(rows)
    scored = [row | {"score": value} for row in rows if (value := score(row, name)) is not None]
    traces = _evaluation(scored, "score", "--green", name)
    if traces and all(score(row, name, "_low") is not None for row in scored):
        above = [(score(row, name, "_high") or 0.0) - row["score"] for row in scored]
        below = [row["score"] - (score(row, name, "_low") or 0.0) for row in scored]
        traces[0]["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
    return chart(f"Held-out {name}", traces, tickformat=".0%" if name == "accuracy" else "")


def _keys(rows: Sequence[Row], prefix: str) -> list[str]:
    return sorted({key for row in rows for key in row if key.startswith(prefix)})


def _of_functions(rows: Sequence[Row]) -> list[Trace]:
    """Draw the mean of each reward function, if there are several."""
    keys = zip(_keys(rows, "rewards/"), itertools.cycle(COLOURS))
    return [trace for key, colour in keys for trace in _line(rows, key, colour, key.removeprefix("rewards/"))]


def _staleness(rows: Sequence[Row], bound: int | None) -> list[Trace]:
    traces = [
        trace
        for name, colour in (("mean", "--blue"), ("max", "--orange"))
        for trace in _line(rows, f"staleness/{name}", colour, name, line={"color": colour, "width": 2, "shape": "hv"})
    ]
    if traces and bound is not None:
        ends = [traces[0]["x"][0], traces[0]["x"][-1]]
        line = {"color": "--red", "width": 1.5, "dash": "dash"}
        traces.append({"type": "scatter", "mode": "lines", "x": ends, "y": [bound] * 2, "name": "bound", "line": line})
    return traces


def _phases(rows: Sequence[Row]) -> list[Trace]:
    """Stack the timers of each step; `other` is the rest of the step."""
    timed = [row for row in rows if row.get("time/step_s")]
    timers = {key for row in timed for key in row if key.startswith("time/")} - {"time/step_s"}
    keys = [*(key for key in PHASES if key in timers), *sorted(timers.difference(PHASES))]
    bars = [
        (key.removeprefix("time/").removesuffix("_s"), colour, [row.get(key) or 0.0 for row in timed])
        for key, colour in zip(keys, itertools.cycle(COLOURS))
    ]
    if timed:
        other = [max(0.0, row["time/step_s"] - sum(row.get(key) or 0.0 for key in keys)) for row in timed]
        bars.append(("other", "--faint", other))
    bar = {"type": "bar", "x": [row["step"] for row in timed]}
    return [
        bar | {"y": seconds, "name": name, "marker": {"color": colour, "line": {"width": 0}}}
        for name, colour, seconds in bars
    ]


def thinned(trace: Trace) -> Trace:
    """Thin a trace to about `MAX_POINTS` points: the extremes of each bucket, so that spikes stay; of bars the mean."""
    num_points = len(trace["x"])
    if num_points <= MAX_POINTS or "error_y" in trace:  # evaluations are few
        return trace
    values = np.array(trace["y"], dtype=float)  # null becomes nan
    edges = np.linspace(0, num_points, MAX_POINTS // 2 + 1).astype(int)
    if trace["type"] == "bar":
        sums = np.add.reduceat(np.nan_to_num(values), edges[:-1])
        return trace | {"x": [trace["x"][edge] for edge in edges[:-1]], "y": (sums / np.diff(edges)).tolist()}
    kept = {0, num_points - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        bucket = values[start:end]
        # A bucket without a number stays a gap in the curve.
        ends = (0,) if np.isnan(bucket).all() else (int(np.nanargmin(bucket)), int(np.nanargmax(bucket)))
        kept.update(start + place for place in ends)
    places = sorted(kept)
    return trace | {key: [trace[key][place] for place in places] for key in ("x", "y")}

"""Thins the curves of a long run to what a screen can show: extremes stay, so that no spike is hidden."""

from typing import Any

import numpy as np

MAX_POINTS = 2000  # of a trace: a chart is less than half as many pixels wide

Trace = dict[str, Any]


def thinned(trace: Trace) -> Trace:
    """Return a trace with at most about `MAX_POINTS` points: least and greatest of each bucket, of bars its mean."""
    num_points = len(trace["x"])
    if num_points <= MAX_POINTS:
        return trace
    values = np.array(trace["y"], dtype=float)  # null becomes nan
    edges = np.linspace(0, num_points, MAX_POINTS // 2 + 1).astype(int)
    if trace["type"] == "bar":
        sums = np.add.reduceat(np.nan_to_num(values), edges[:-1])
        return trace | {"x": [trace["x"][edge] for edge in edges[:-1]], "y": (sums / np.diff(edges)).tolist()}
    kept = {0, num_points - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        bucket = values[start:end]
        # A bucket that has no number is a gap in the curve, and stays one.
        ends = (0,) if np.isnan(bucket).all() else (int(np.nanargmin(bucket)), int(np.nanargmax(bucket)))
        kept.update(start + place for place in ends)
    places = sorted(kept)
    taken: Trace = {key: [trace[key][place] for place in places] for key in ("x", "y", "text") if key in trace}
    if error := trace.get("error_y"):
        taken["error_y"] = error | {key: [error[key][place] for place in places] for key in ("array", "arrayminus")}
    return trace | taken

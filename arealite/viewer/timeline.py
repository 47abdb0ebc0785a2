"""When each version of the weights was published and how it was checked, and which servers came and went."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from arealite.viewer.charts import Chart, Row, chart

_WAYS = {"disk": "through the disk", "broadcast": "by broadcast"}


def timeline(rows: Sequence[Row], fingerprints: Mapping[int, str], way: str) -> list[Chart]:
    """Draw the updates and servers over the seconds of the run's steps; `fingerprints` are the trainer's by version."""
    ends_s = itertools.accumulate(row.get("time/step_s") or 0.0 for row in rows)
    timed = [
        (end_s - (row.get("time/save_s") or 0.0), row) for end_s, row in zip(ends_s, rows) if "time/weights_s" in row
    ]
    if not timed:
        return []
    updates = {
        "type": "scatter", "mode": "markers", "name": "seconds of a weight update", "marker": {"color": "--purple"},
        "x": [at_s for at_s, _ in timed], "y": [row["time/weights_s"] for _, row in timed],
        "text": [_in_words(row, fingerprints.get(int(row["step"]) + 1), way) for _, row in timed],
    }  # fmt: skip
    served = [(at_s, row) for at_s, row in timed if "servers/live" in row]
    line = {"color": "--green", "width": 2, "shape": "hv"}
    servers = {
        "type": "scatter", "mode": "lines+markers", "name": "servers (right)", "yaxis": "y2", "line": line,
        "x": [at_s for at_s, _ in served], "y": [row["servers/live"] for _, row in served],
        "text": _changes([row for _, row in served]), "marker": {"color": "--green", "size": 4},
    }  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "seconds", "standoff": 4}, "rangemode": "tozero"},
    }
    if served:
        most = max(row["servers/live"] or 0 for _, row in served)
        whole = {"tickmode": "linear", "tick0": 0, "dtick": max(1, math.ceil(most / 5)), "rangemode": "tozero"}
        layout["yaxis2"] = {"overlaying": "y", "side": "right", "showgrid": False, **whole}
    traces = [one for one in (updates, servers) if one["x"]]
    return [chart("Timeline of weights and servers", traces, unit="seconds", **layout)]


def _in_words(row: Row, fingerprint: str | None, way: str) -> str:
    """Return what is known of the version that a step has published."""
    how = f" {_WAYS.get(way, '')}".rstrip()
    if way == "broadcast" and row.get("weights/sent_mib") == 0.0:
        how = " within the trainer's process"
    gap, mismatched = row.get("policy/canary_gap"), int(row.get("weights/mismatched_tensors") or 0)
    checks = [] if gap is None else [f"asked of every server: canary gap {gap:.1e}"]
    checks += [f"{mismatched} mismatched tensors so far"] if mismatched else []
    is_hex = isinstance(fingerprint, str) and re.fullmatch("[0-9a-f]{1,64}", fingerprint)
    known = [f"the trainer's fingerprint {fingerprint}"] if is_hex else []
    return "; ".join([f"version {row['step'] + 1}{how}", *(checks or ["no canary"]), *known])


def _changes(rows: Sequence[Row]) -> list[str]:
    """Return who came and went since the row before, in words."""
    counts = [{name: int(row.get(f"servers/{name}") or 0) for name in ("joined", "left")} for row in rows]
    before = [dict.fromkeys(("joined", "left"), 0), *counts]
    changes = [
        {name: now[name] - then[name] for name in now if now[name] > then[name]} for then, now in zip(before, counts)
    ]
    return [", ".join(f"{count} {name}" for name, count in change.items()) for change in changes]

"""`graph.html`: the progress of a run with a graph, on a self-contained page without scripts.

The master rewrites it every few seconds, and a browser reloads it until the run has ended.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path

from arealite import viewer
from arealite.api.run_folder import RunFolder
from arealite.core.graph import DataFlowGraph, ModelFunctionCall
from arealite.core.records import CallRecord, CallState, Summary, summary
from arealite.launcher.plan.layout import Group
from arealite.utils.files import write_atomically

RELOAD_S = 2
ROW_HEIGHT, LETTER_WIDTH, BAR_WIDTH, END_WIDTH = 26, 7.8, 720, 150
_CSS = Path(viewer.__file__).with_name("page") / "page.css", Path(__file__).with_name("page.css")

# Sizes of the drawing of the graph.
COLUMN_GAP, ROW_GAP, BOX_WIDTH, BOX_HEIGHT, MARGIN = 56, 20, 216, 74, 8
NAME_WIDTH = 8.5  # of a letter
SIGNS = {"waiting": "○", "running": "▶", "done": "✓", "replayed": "↻"}


@dataclass(frozen=True)
class Incident:
    """A failure and the reaction to it; `time` in unix seconds."""

    time: float
    text: str


@dataclass
class Progress:
    """The data of the page."""

    graph: DataFlowGraph
    step: int = 0
    """The step that runs, or ran last."""
    states: dict[str, CallState] = field(default_factory=dict)
    machines: Mapping[Group, Sequence[str]] = field(default_factory=dict)
    """By group of workers, the nodes of its ranks."""
    calls: Sequence[CallRecord] = ()
    """Those of the last finished step."""
    incidents: Sequence[Incident] = ()
    is_finished: bool = False


def write_page(run: RunFolder, progress: Progress, *, now: float) -> None:
    """Write `graph.html` into the run folder; `now` in unix seconds."""
    write_atomically(run.graph, render(run, progress, now=now))


def render(run: RunFolder, progress: Progress, *, now: float) -> str:
    """Return the page as HTML."""
    folder = run.path.resolve()
    title = escape(f"{folder.parent.name} / {folder.name}")
    lead = f"Step {progress.step} {'was the last' if progress.is_finished else 'is running'}. "
    lead += f"This page was written on {_date(now)} at {_clock(now)}."
    reload = "" if progress.is_finished else f'<meta http-equiv="refresh" content="{RELOAD_S}">'
    calls = progress.calls  # the master may replace it while this thread draws
    last = summary(calls, [group.name for group in progress.machines]) if calls else None
    body = [
        f'<header><p class="brand">AReaLite dataflow</p><h1>{title}</h1><p class="lead">{lead}</p></header>',
        _cards(calls, last) if last else "",
        _section(f"Step {progress.step}", f'<div class="drawing">{svg(progress.graph, progress.states)}</div>'),
        _section("Groups of workers", _groups(progress, last)),
    ]
    if last:
        heading = f"Timeline of step {calls[0].step}"
        body.append(_section(heading, f'<div class="drawing">{_timeline(calls, last)}</div>'))
    body.append(_section("Incidents", _incidents(progress.incidents)))
    content = "\n".join(body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{reload}
<title>{title}</title>
<style>
{"".join(path.read_text(encoding="utf-8") for path in _CSS)}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>"


def svg(graph: DataFlowGraph, states: Mapping[str, CallState]) -> str:
    """Draw the graph in columns from left to right, by the longest path to a call; a call without a state waits."""
    width = max(BOX_WIDTH, 28 + NAME_WIDTH * max(len(call.name) for call in graph.calls))
    depths: dict[str, int] = {}
    columns: dict[int, list[str]] = {}
    for call in graph.order():
        depth = depths[call.name] = max((depths[name] + 1 for name in graph.needs[call.name]), default=0)
        columns.setdefault(depth, []).append(call.name)
    pitch, num_rows = BOX_HEIGHT + ROW_GAP, max(map(len, columns.values()))
    corners = {
        name: (MARGIN + column * (width + COLUMN_GAP), MARGIN + pitch * (row + (num_rows - len(names)) / 2))
        for column, names in columns.items()
        for row, name in enumerate(names)
    }
    right = 2 * MARGIN + len(columns) * (width + COLUMN_GAP) - COLUMN_GAP
    bottom = 2 * MARGIN + num_rows * pitch - ROW_GAP
    lines = [
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="dataflow graph" '
        f'width="{right:g}" height="{bottom:g}" viewBox="0 0 {right:g} {bottom:g}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    for before, name, keys in graph.edges():
        title = escape(f"{before} to {name}: {', '.join(keys) or 'order only'}")
        kind = "" if keys else ' class="after"'
        (x, y), (end_x, end_y) = corners[before], corners[name]
        x, y, end_y, middle = x + width, y + BOX_HEIGHT / 2, end_y + BOX_HEIGHT / 2, (x + width + end_x) / 2
        curve = f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {end_y:g} {end_x:g} {end_y:g}"
        lines.append(f'<path{kind} marker-end="url(#head)" d="{curve}"><title>{title}</title></path>')
    for call in graph.order():  # boxes cover the edges that pass behind them
        lines.append(_box(call, states.get(call.name, CallState()), *corners[call.name], width))
    return "\n".join([*lines, "</svg>"])


def _box(call: ModelFunctionCall, state: CallState, left: float, top: float, width: float) -> str:
    lines = [
        ("name", call.name),
        ("kind", f"{call.role} · {call.interface}"),
        ("state", f"{SIGNS[state.status]} {_progress(state)}"),
    ]
    texts = "".join(
        f'<text class="{kind}" x="{left + 14:g}" y="{top + 19 * row + 22.5:g}">{escape(text)}</text>'
        for row, (kind, text) in enumerate(lines)
    )
    rect = f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="8"/>'
    return f'<g class="{state.status}" data-call="{call.name}">{rect}{texts}</g>'


def _progress(state: CallState) -> str:
    if state.begin is None:
        return "waiting"
    if state.end is None:
        return f"running since {_clock(state.begin)}"
    return f"{state.status} in {state.end - state.begin:.1f} s"


def _cards(calls: Sequence[CallRecord], last: Summary) -> str:
    """Return the numbers of the last finished step."""
    num_again = sum(call.attempt > 1 for call in calls)
    cards = [
        ("Last step", f"{last.end - last.begin:.1f} s", f"{len(calls)} calls of step {calls[0].step}"),
        ("Overlap", f"{last.overlap:.2f}", "seconds of calls per second"),
        ("Moved", f"{last.moved_mib:,.1f} MiB", "between workers"),
        ("Run again", str(num_again), "calls after a failure"),
    ]
    texts = (f'<div class="card"><dt>{name}</dt><dd>{value}</dd><p>{note}</p></div>' for name, value, note in cards)
    return f'<dl class="cards">{"".join(texts)}</dl>'


def _groups(progress: Progress, last: Summary | None) -> str:
    rows = [("group", "roles", "ranks", "machines", "idle in the last step")]
    for group, machines in progress.machines.items():
        idle = f"{last.idle[group.name]:.0%}" if last else ""
        rows.append((group.name, ", ".join(group.roles), str(group.num_ranks), ", ".join(machines), idle))
    return _table(rows, kind="groups")


def _incidents(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return '<p class="note">None so far.</p>'
    newest = sorted(incidents, key=lambda incident: incident.time, reverse=True)
    rows = [(f"{_date(incident.time)} {_clock(incident.time)}", incident.text) for incident in newest]
    return _table([("time", "what happened"), *rows], kind="incidents")


def _table(rows: Iterable[Sequence[str]], *, kind: str) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append(f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in row)}</tr>")
    return f'<div class="table {kind}"><table>{"".join(lines)}</table></div>'


def _timeline(calls: Sequence[CallRecord], last: Summary) -> str:
    """Draw a bar per attempt, in the order in which they began, over the seconds of the step."""
    start, seconds = last.begin, last.end - last.begin
    scale = BAR_WIDTH / seconds
    zero = 16 + LETTER_WIDTH * max(len(f"{call.call} {call.group}") for call in calls)
    width, height = zero + BAR_WIDTH + END_WIDTH, ROW_HEIGHT * (len(calls) + 1)
    lines = [
        f'<svg class="timeline" role="img" aria-label="timeline of calls" width="{width:g}" height="{height}" '
        f'viewBox="0 0 {width:g} {height}">'
    ]
    for second in _ticks(seconds):
        x = zero + second * scale
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - ROW_HEIGHT}"/>')
        lines.append(f'<text class="soft" text-anchor="middle" x="{x:.1f}" y="{height - 8}">{second:g} s</text>')
    for row, call in enumerate(sorted(calls, key=lambda call: call.begin)):
        left, length = zero + (call.begin - start) * scale, max(2.0, call.seconds * scale)
        y = row * ROW_HEIGHT
        duration = f"{call.seconds:.2f} s" + (f", attempt {call.attempt}" if call.attempt > 1 else "")
        lines += [
            f'<g class="{"again" if call.attempt > 1 else "first"}" data-call="{escape(call.call)}">',
            f'<text x="0" y="{y + 17}">{escape(call.call)} <tspan class="soft">{escape(call.group)}</tspan></text>',
            f'<rect x="{left:.1f}" y="{y + 5}" width="{length:.1f}" height="{ROW_HEIGHT - 10}" rx="3"/>',
            f'<text class="soft" x="{left + length + 6:.1f}" y="{y + 17}">{duration}</text></g>',
        ]
    return "\n".join([*lines, "</svg>"])


def _ticks(seconds: float) -> list[float]:
    """Return at most eight round numbers from 0 to `seconds`."""
    size = 10.0 ** math.floor(math.log10(seconds / 7))
    step = next(size * factor for factor in (1, 2, 5, 10) if seconds <= 7 * size * factor)
    return [number * step for number in range(int(seconds / step) + 1)]


def _date(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d}"


def _clock(time: float) -> str:
    """Return the local time of day of unix seconds."""
    return f"{datetime.fromtimestamp(time):%H:%M:%S}"

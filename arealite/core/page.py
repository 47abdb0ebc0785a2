"""`graph.html`: the progress of a run with a graph, on a self-contained page without scripts.

The master rewrites it every few seconds, and a browser reloads it until the run has ended.
"""

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
_CSS = Path(viewer.__file__).with_name("page") / "page.css", Path(__file__).with_name("page.css")
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
        _section(f"Step {progress.step}", _drawing(progress.graph, progress.states)),
        _section("Groups of workers", _groups(progress, last)),
    ]
    if last:
        body.append(_section(f"Timeline of step {calls[0].step}", _timeline(calls, last)))
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


def _drawing(graph: DataFlowGraph, states: Mapping[str, CallState]) -> str:
    """Show the calls in columns from left to right, by the longest path to a call; a call without a state waits."""
    depths: dict[str, int] = {}
    columns: dict[int, str] = {}
    for call in graph.order():
        depth = depths[call.name] = max((depths[name] + 1 for name in graph.needs[call.name]), default=0)
        box = _box(call, states.get(call.name, CallState()), graph.direct_needs(call.name))
        columns[depth] = columns.get(depth, "") + box
    return f'<div class="drawing graph">{"".join(f"<div>{boxes}</div>" for boxes in columns.values())}</div>'


def _box(call: ModelFunctionCall, state: CallState, after: Sequence[str]) -> str:
    texts = {
        "name": call.name,
        "kind": f"{call.role} · {call.interface}",
        "after": f"after {', '.join(after)}" if after else "",
        "state": f"{SIGNS[state.status]} {_progress(state)}",
    }
    lines = "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in texts.items())
    return f'<div class="call {state.status}" data-call="{call.name}">{lines}</div>'


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
    percent = 100 / (last.end - last.begin)
    lines = []
    for call in sorted(calls, key=lambda call: call.begin):
        name = f'{escape(call.call)} <span class="soft">{escape(call.group)}</span>'
        place = f"margin-left:{(call.begin - last.begin) * percent:.3f}%;width:{call.seconds * percent:.3f}%"
        kind, attempt = ("again", f", attempt {call.attempt}") if call.attempt > 1 else ("first", "")
        bar = f'<td class="bar"><div style="{place}"></div></td>'
        lines.append(f'<tr class="{kind}"><td>{name}</td>{bar}<td>{call.seconds:.2f} s{attempt}</td></tr>')
    return f'<div class="drawing timeline"><table>{"".join(lines)}</table></div>'


def _date(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d}"


def _clock(time: float) -> str:
    """Return the local time of day of unix seconds."""
    return f"{datetime.fromtimestamp(time):%H:%M:%S}"

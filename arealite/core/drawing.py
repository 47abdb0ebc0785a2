"""The drawing of a dataflow graph: an SVG in layers from left to right, with the states of its calls.

A call's layer is the length of the longest path to it. An edge over several layers gets a place of its own in each
layer between, so that it passes no box. Colours are CSS variables of the page, with values of their own for a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from arealite.core.graph import DataFlowGraph, ModelFunctionCall

    Node = str | tuple[str, str, int]  # a call, or an edge (from, to) where it passes a layer
    Centres = dict[Node, tuple[float, float]]

COLUMN_GAP, ROW_GAP, BOX_WIDTH, BOX_HEIGHT, PASS_HEIGHT, MARGIN = 56, 20, 216, 74, 14, 8
NAME_WIDTH = 8.5  # of a letter
SIGNS = {"waiting": "○", "running": "▶", "done": "✓", "replayed": "↻"}

STYLE = """
.graph text { font-size: 13px; fill: var(--soft, #5d6675); }
.graph .name { font-size: 14px; font-weight: 600; fill: var(--ink, #1b1f27); }
.graph rect { fill: var(--panel, #ffffff); stroke: var(--faint, #c3c9d4); stroke-width: 1.5; }
.graph path { fill: none; stroke: var(--soft, #5d6675); stroke-width: 1.3; }
.graph path.after { stroke-dasharray: 2 4; }
.graph .head { fill: var(--soft, #5d6675); stroke: none; }
.graph .waiting rect { stroke-dasharray: 5 4; }
.graph .running rect { stroke: var(--blue, #3a6fd8); stroke-width: 3; }
.graph .running .state { fill: var(--blue, #3a6fd8); font-weight: 600; }
.graph .done rect { stroke: var(--green, #238a5c); }
.graph .done .state { fill: var(--green, #238a5c); }
.graph .replayed rect { stroke: var(--orange, #d17a1f); stroke-width: 2.5; stroke-dasharray: 12 3; }
.graph .replayed .state { fill: var(--orange, #d17a1f); }
"""


@dataclass(frozen=True)
class CallState:
    """State of a call in the current step; times in unix seconds."""

    status: Literal["waiting", "running", "done", "replayed"] = "waiting"
    begin: float | None = None
    """Given unless the call is waiting."""
    end: float | None = None
    """Given if the call is done or replayed."""


def svg(graph: DataFlowGraph, states: Mapping[str, CallState]) -> str:
    """Return the drawing as an `<svg>` element; a call without a state waits."""
    width = max(BOX_WIDTH, 28 + NAME_WIDTH * max(len(call.name) for call in graph.calls))
    depths, routes = _layers(graph)
    centres = _centres(graph, depths, routes, width)
    right = max(x for x, _ in centres.values()) + width / 2 + MARGIN
    bottom = max(y for _, y in centres.values()) + BOX_HEIGHT / 2 + MARGIN
    lines = [
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="dataflow graph" '
        f'width="{right:g}" height="{bottom:g}" viewBox="0 0 {right:g} {bottom:g}" font-family="sans-serif">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    for before, name, keys in graph.edges():
        told = escape(f"{before} to {name}: {', '.join(keys) or 'order only'}")
        kind = "" if keys else ' class="after"'
        curve = _curve(routes[before, name], centres, width)
        lines.append(f'<path{kind} marker-end="url(#head)" d="{curve}"><title>{told}</title></path>')
    for call in graph.order():
        lines.append(_box(call, states.get(call.name, CallState()), *centres[call.name], width))
    return "\n".join([*lines, "</svg>"])


def _layers(graph: DataFlowGraph) -> tuple[dict[str, int], dict[tuple[str, str], list[Node]]]:
    """Return the layer of each call, and what each drawn edge passes from its first to its last call."""
    depths: dict[str, int] = {}
    for call in graph.order():
        depths[call.name] = max((depths[name] + 1 for name in graph.needs[call.name]), default=0)
    routes: dict[tuple[str, str], list[Node]] = {}
    for before, name, _ in graph.edges():
        between: list[Node] = [(before, name, layer) for layer in range(depths[before] + 1, depths[name])]
        routes[before, name] = [before, *between, name]
    return depths, routes


def _centres(
    graph: DataFlowGraph, depths: Mapping[str, int], routes: Mapping[tuple[str, str], list[Node]], width: float
) -> Centres:
    """Stack each layer around one line, its nodes by the mean height of what they follow, then as declared."""
    layers: list[list[Node]] = [[] for _ in range(max(depths.values()) + 1)]
    follows: dict[Node, list[Node]] = {call.name: [] for call in graph.calls}
    for call in graph.order():
        layers[depths[call.name]].append(call.name)
    for route in routes.values():
        for before, node in itertools.pairwise(route):
            follows.setdefault(node, []).append(before)
            if isinstance(node, tuple):
                layers[node[2]].append(node)
    centres: Centres = {}
    for column, layer in enumerate(layers):
        heights = {node: sum(centres[one][1] for one in follows[node]) / max(1, len(follows[node])) for node in layer}
        layer.sort(key=heights.__getitem__)
        sizes = [PASS_HEIGHT if isinstance(node, tuple) else BOX_HEIGHT for node in layer]
        top = -(sum(sizes) + ROW_GAP * (len(sizes) - 1)) / 2
        for node, size in zip(layer, sizes):
            centres[node] = (column * (width + COLUMN_GAP), top + size / 2)
            top += size + ROW_GAP
    highest = min(y for _, y in centres.values()) - BOX_HEIGHT / 2
    return {node: (x + width / 2 + MARGIN, y - highest + MARGIN) for node, (x, y) in centres.items()}


def _curve(route: list[Node], centres: Centres, width: float) -> str:
    """Return the path from the right side of the first box to the left side of the last."""
    x, y = centres[route[0]]
    x += width / 2
    path = f"M{x:g} {y:g}"
    for node in route[1:]:
        next_x, next_y = centres[node]
        middle = (x + next_x - width / 2) / 2
        path += f"C{middle:g} {y:g} {middle:g} {next_y:g} {next_x - width / 2:g} {next_y:g}"
        if isinstance(node, tuple):
            path += f"H{next_x + width / 2:g}"
        x, y = next_x + width / 2, next_y
    return path


def _box(call: ModelFunctionCall, state: CallState, x: float, y: float, width: float) -> str:
    left, top = x - width / 2, y - BOX_HEIGHT / 2
    what, told = f"{call.role} · {call.interface}", f"{SIGNS[state.status]} {_words(state)}"
    lines = [("name", call.name), ("kind", what), ("state", told)]
    texts = "".join(
        f'<text class="{kind}" x="{left + 14:g}" y="{y + 19 * (row - len(lines) / 2) + 14:g}">{escape(text)}</text>'
        for row, (kind, text) in enumerate(lines)
    )
    rect = f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="8"/>'
    return f'<g class="{state.status}" data-call="{call.name}">{rect}{texts}</g>'


def _words(state: CallState) -> str:
    if state.begin is None:
        return "waiting"
    if state.end is None:
        return f"running since {clock(state.begin)}"
    return f"{state.status} in {state.end - state.begin:.1f} s"


def clock(time: float) -> str:
    """Return the local time of day of unix seconds."""
    return f"{datetime.fromtimestamp(time):%H:%M:%S}"

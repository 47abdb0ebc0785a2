"""Charts of what each server sampled for the steps of a run, and how often a weight update interrupted it."""

import contextlib
import itertools
from collections import Counter
from pathlib import Path

from arealite.api.errors import LedgerError
from arealite.rollout.account.ledger_file import open_for_reading
from arealite.viewer.charts import PHASE_COLOURS, Chart, chart

_MOST = len(PHASE_COLOURS)  # servers with a colour; the others share one
_SAMPLED = """
SELECT trained_version, server, sum(tokens), sum(num_interrupts) FROM prompts JOIN samples USING (ticket)
WHERE state = 'trained' AND trained_version IS NOT NULL GROUP BY 1, 2 ORDER BY 1
"""


def server_charts(ledger: Path) -> list[Chart]:
    """Return the charts that a ledger has data for; one that can't be read is reported by who reads prompts from it."""
    if not ledger.exists():
        return []
    rows: list[tuple[int, str, int | None, int | None]] = []
    with contextlib.suppress(LedgerError), open_for_reading(ledger) as database:
        rows = database.execute(_SAMPLED).fetchall()
    totals, tokens, interrupts = Counter[str](), Counter[tuple[str, int]](), Counter[int]()
    for step, server, num_tokens, num_interrupts in rows:
        totals[server] += num_tokens or 0
        interrupts[step] += num_interrupts or 0
    named = [server for server, _ in totals.most_common(_MOST)]
    for step, server, num_tokens, _ in rows:
        tokens[server if server in named else "others", step] += num_tokens or 0
    steps, charts = sorted(interrupts), list[Chart]()
    if len(totals) > 1:
        names = [*named, *(["others"] if len(totals) > _MOST else [])]
        bars = [
            {"type": "bar", "x": steps, "y": [tokens[name, step] for step in steps], "name": name}
            | {"marker": {"color": colour, "line": {"width": 0}}}
            for name, colour in zip(names, itertools.chain(PHASE_COLOURS, ["--faint"]))
        ]
        charts.append(chart("Sampled by server", bars, unit="tokens", barmode="stack", bargap=0))
    if any(interrupts.values()):
        style = {"mode": "lines" if len(steps) > 1 else "markers", "line": {"color": "--purple"}, "name": "interrupted"}
        line = {"type": "scatter", "x": steps, "y": [interrupts[step] for step in steps], **style}
        charts.append(chart("Interrupted generations", [line], unit="of the step's samples"))
    return charts

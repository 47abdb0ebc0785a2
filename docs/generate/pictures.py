"""The pictures of the README, made from a real run: `make pictures` trains the quickstart and takes them.

`docs/assets/run.png` plots its metrics, `docs/assets/viewer.png` is a screenshot of `arealite view`, both by Chromium.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from arealite.api.run_folder import RunFolder

ASSETS = Path(__file__).parents[1] / "assets"
MAX_BYTES = 150_000
SETTLE_MS = 20_000  # of the page's own clock, which Chromium advances while nothing is loading
PANELS = (  # title, and the metrics drawn in it: name in the legend, key, colour
    ("held-out accuracy", [("accuracy", "eval/accuracy", "#3f51b5")]),
    ("tokens of a completion", [("tokens", "rollout/completion_tokens", "#00897b")]),
    ("staleness, in weight versions", [("max", "staleness/max", "#ef6c00"), ("mean", "staleness/mean", "#f9a825")]),
)


def figure(rows: list[dict[str, Any]]) -> go.Figure:
    """Draw the panels side by side over the training step."""
    plot = make_subplots(rows=1, cols=len(PANELS), subplot_titles=[title for title, _ in PANELS])
    for column, (_, curves) in enumerate(PANELS, start=1):
        for name, key, colour in curves:
            points = [(row["step"], row[key]) for row in rows if key in row]
            steps, values = zip(*points, strict=True)
            line = {"color": colour, "width": 2}
            marks = {"size": 5} if len(points) < 40 else None
            mode = "lines+markers" if marks else "lines"
            plot.add_scatter(x=steps, y=values, name=name, line=line, marker=marks, mode=mode, row=1, col=column)
        plot.update_yaxes(rangemode="tozero", row=1, col=column)
    plot.update_xaxes(title="training step")
    margin = {"l": 40, "r": 20, "t": 40, "b": 45}
    plot.update_layout(template="plotly_white", showlegend=False, width=1200, height=300, margin=margin)
    return plot


def screenshot(address: str, picture: Path, *, width: int, height: int) -> None:
    """Save what Chromium shows of a page, in at most `MAX_BYTES`. Raises SystemExit without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("Chromium must be installed: got none. apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += [f"--screenshot={picture}", f"--window-size={width},{height}", f"--virtual-time-budget={SETTLE_MS}"]
        subprocess.run([chromium, *options, address], check=True, capture_output=True, timeout=120)
    if (size := picture.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"{picture} must have at most {MAX_BYTES} bytes: got {size}. Make its window smaller.")


def main() -> None:
    """Take both pictures of a run that has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of the quickstart")
    parser.add_argument("--row", type=int, required=True, help="number of the trajectory that the viewer opens")
    args = parser.parse_args()
    rows = [json.loads(line) for line in RunFolder(args.run).metrics.read_text().splitlines()]
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        figure(rows).write_html(page, config={"displayModeBar": False})
        screenshot(page.as_uri(), ASSETS / "run.png", width=1200, height=316)
    command = [sys.executable, "-m", "arealite.cli.main", "view", str(args.run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        address = viewer.stdout.readline().strip()
        screenshot(f"{address}&view=rows&row={args.row}", ASSETS / "viewer.png", width=1200, height=640)
        viewer.terminate()


if __name__ == "__main__":
    main()

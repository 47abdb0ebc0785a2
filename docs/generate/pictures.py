"""The pictures of the README, made from a real run: `make pictures` trains the quickstart and takes them.

`docs/assets/run.png` plots its metrics, `docs/assets/viewer.png` is a screenshot of `arealite view`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from PIL import Image
from playwright.sync_api import sync_playwright
from plotly.subplots import make_subplots

from arealite.api.run_folder import RunFolder
from arealite.viewer.runs import RunView

ASSETS = Path(__file__).parents[1] / "assets"
MAX_BYTES = 150_000  # GitHub shows the README at once
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


def screenshot(
    address: str, picture: Path, *, width: int, height: int, prepare: Callable[[Any], None] | None = None
) -> None:
    """Save a page as Chromium shows it, in at most `MAX_BYTES`; `prepare` acts on it first as a user would."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(address, wait_until="networkidle")
        if prepare is not None:
            prepare(page)
        page.screenshot(path=picture)
        browser.close()
    Image.open(picture).quantize(128).save(picture, optimize=True)
    if (size := picture.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"{picture} must have at most {MAX_BYTES} bytes: got {size}. Make its window smaller.")


def colour_tokens(page: Any) -> None:
    """Show the tokens of the open trajectory, coloured by their probability to the server."""
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_label("Colour").select_option("logprobs")
    page.wait_for_load_state("networkidle")


def first_row(run: Path, step: int) -> int:
    """Return the viewer's number of the first trajectory of a training step."""
    view, start = RunView(run), 0
    while not (rows := view.rows(-1, 0))["is_complete"]:
        pass
    for name, count in rows["names"]:
        if name == f"step_{step}":
            return start
        start += count
    raise SystemExit(f"{run} must have trajectories of step {step}: got none. Train longer.")


def main() -> None:
    """Take both pictures of a run that has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of the quickstart")
    parser.add_argument("--step", type=int, default=8, help="training step whose first trajectory the viewer opens")
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
        address = f"{viewer.stdout.readline().strip()}&view=rows&row={first_row(args.run, args.step)}"
        screenshot(address, ASSETS / "viewer.png", width=1200, height=800, prepare=colour_tokens)
        viewer.terminate()


if __name__ == "__main__":
    main()

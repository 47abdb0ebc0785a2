"""A standalone page about a run: the viewer's page with all the data that it would request.

`report.html` shows trajectories spread over the run's steps. Texts of models and data sets are data to the page, never
markup.
"""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.utils.files import FileError, write_atomically
from arealite.viewer.describe import FILES_OF_RUNS, is_run
from arealite.viewer.plain import to_json
from arealite.viewer.runs import RunView
from arealite.viewer.samples import spread_steps

PAGE = Path(__file__).with_name("page")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run folder and return its path."""
    folder = Path(run_dir)
    if not is_run(folder):
        raise ConfigError(
            f"a run folder must hold {' or '.join(FILES_OF_RUNS)}: got none in {folder}. "
            "Pass <fileroot>/<experiment>/<trial>."
        )
    run = RunFolder(folder)
    steps = spread_steps(run.rollouts)
    view = RunView(folder, only=steps)
    while not (columns := view.rows(-1, 0))["is_complete"]:
        pass
    if columns["problems"]:
        raise FileError(columns["problems"][0])
    numbers, start = list[int](), 0
    for name, count in columns["names"]:
        stored = [start + place for place in range(count) if columns["tokens"][start + place] > 0]
        numbers += stored[: steps[name]]
        start += count
    write_atomically(run.report, freeze(view, columns["generation"], numbers))
    return run.report


def freeze(view: RunView, generation: int, numbers: Sequence[int]) -> str:
    """Return the page about a run and some of its trajectories."""
    data = view.frozen(generation, numbers)
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()} | {"plotly.js": get_plotlyjs()}
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    title = f"{policy}\n<title>{html.escape(data['run']['title'])}"
    inside = to_json(data).decode().replace("<", "\\u003c")  # "</script>" would end the element
    page = re.sub("<title>[^<]*", lambda _: title, files["view.html"])
    page = page.replace("<script ", f'<script type="application/json" id="data">{inside}</script>\n<script ', 1)
    styles = '<link rel="stylesheet" href="files/(.*?)">'
    page = re.sub(styles, lambda match: f"<style>\n{files[match[1]]}</style>", page)
    return re.sub('<script src="files/(.*?)">', lambda match: f"<script>\n{files[match[1]]}", page)

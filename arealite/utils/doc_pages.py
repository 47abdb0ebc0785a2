"""The pages of docs/ as an installation has them: which one is about what, and the line that leads there.

They are installed with the package. If its metadata have the address of the site, a line ends with the same page there.
This file must import where only the standard library is.
"""

import functools
import re
from pathlib import Path

TROUBLESHOOTING = "troubleshooting.md"
PLACES = {
    "agent": "agents.md#one-of-your-own-from-an-empty-folder",
    "algorithms": "algorithms.md",
    "api": f"{TROUBLESHOOTING}#a-value-is-refused",
    "cli": "how-to.md",
    "cli/check_loss": "own-loss.md#2-check-it",
    "cli/init": "trainers.md#an-experiment-to-change",
    "cli/own_data": "trainers.md#your-own-data-and-rewards-in-one-command",
    "cli/own_trainer": "trainers.md#a-trainer-of-your-own",
    "cli/plan_core": "core.md#which-layout",
    "cli/replay": "reliability.md#replay",
    "cli/serve": "cluster.md#servers-that-join-and-leave",
    "cli/train": "trainers.md",
    "core": "core.md",
    "dataset": "data-and-rewards.md#keys-of-train_dataset-and-valid_dataset",
    "engine": "models.md",
    "engine/lora": "models.md#lora",
    "engine/ppo": "algorithms.md",
    "engine/ppo/own_functions": "own-loss.md#1-write-it",
    "generation": "compatibility.md#the-embedded-server",
    "inference": "compatibility.md#what-they-do-differently",
    "launcher": "cluster.md",
    "launcher/place/ray": "cluster.md#ray",
    "launcher/place/slurm": "cluster.md#slurm",
    "launcher/plan/layout": "core.md#where-roles-lie",
    "launcher/serve": "compatibility.md#starting-them",
    "launcher/slurm": "cluster.md#slurm",
    "migrate": "migration.md",
    "reward": "data-and-rewards.md#data-and-a-reward",
    "rollout": "reliability.md#one-account-of-every-prompt",
    "server": "compatibility.md#the-embedded-server",
    "trainer": "reliability.md#recovery",
    "trainer/evaluat": "evaluation.md",
    "viewer": "view.md",
    "watchdog": "stalls.md",
    "weights": "reliability.md#the-servers-have-the-trainers-weights",
    "workflow": "workflows.md#what-to-keep-to",
}
"""By beginnings of paths in the package; what `utils` raises belongs to its caller."""
_PACKAGE = Path(__file__).parents[1]
_QUOTE = re.compile(r"> (`+)(.*)\1")
_MIN_LETTERS = 20  # of a quote that tells one message from others
_MAX_LETTERS = 1000  # of a message that are compared


def page_of_file(file: str) -> str:
    """Return the page of what a file of the package raises; empty for other files."""
    places = [place for place in PLACES if file.startswith(f"{_PACKAGE}/{place}")]
    return PLACES[max(places, key=len)] if places else ""


def page_of_message(message: str) -> str:
    """Return the section on troubleshooting that quotes a message, by the longest such quote; empty if none does."""
    found, heading = [(0, "")], ""
    for line in _lines(TROUBLESHOOTING):
        if line.startswith("#"):
            heading = line
        elif quote := _QUOTE.fullmatch(line):
            parts = quote[2].split("…")
            if re.match(".*".join(map(re.escape, parts)), message[:_MAX_LETTERS], re.DOTALL):
                found.append((sum(map(len, parts)), f"{TROUBLESHOOTING}#{_anchor(heading)}"))
    num_letters, page = max(found)
    return page if num_letters >= _MIN_LETTERS else ""


def more(page: str) -> list[str]:
    """Return the line that leads to a page, as editors and terminals open it; none if the pages are not installed."""
    name, _, anchor = page.partition("#")
    headings = [(number, line) for number, line in enumerate(_lines(name), start=1) if line.startswith("#")]
    for number, heading in headings:
        if not anchor or _anchor(heading) == anchor:
            line = f"  more: {folder() / name}:{number} ({heading.lstrip('# ')})"
            return [f"{line}, {address()}/{Path(name).stem}.html#{_anchor(heading)}" if address() else line]
    return []


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


@functools.cache
def _lines(name: str) -> tuple[str, ...]:
    """Return the lines of a page; those of code blocks are empty. Without the page there are none."""
    try:
        text = (folder() / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(re.sub(r"(?ms)^```.*?^```", lambda block: "\n" * block[0].count("\n"), text).splitlines())


def folder() -> Path:
    """Return the pages that an installation carries, or the checkout's."""
    installed = _PACKAGE / "docs"
    return installed if installed.is_dir() else _PACKAGE.parent / "docs"


@functools.cache
def address() -> str:
    """Return where the site of `make docs` is published: `Documentation` of `[project.urls]`; empty if it is not."""
    from importlib import metadata  # takes 20 ms, which only errors need

    try:
        urls = metadata.metadata("arealite").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return ""
    named = {label.strip(): where.strip() for label, _, where in (url.partition(",") for url in urls)}
    return named.get("Documentation", "").rstrip("/")

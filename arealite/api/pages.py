"""Which page of docs/ says more about an error, as one line below its message.

The pages are installed with the package. A message that the page on troubleshooting quotes belongs to that symptom, any
other to the page of its class or of the file that raised it. This file must import where only the standard library is.
"""

import functools
import re
from pathlib import Path

from arealite.api import errors
from arealite.utils.source_lines import lines_of_error

TROUBLESHOOTING = "troubleshooting.md"
CLASSES: dict[type[BaseException], str] = {
    errors.CheckpointError: f"{TROUBLESHOOTING}#a-checkpoint-is-refused",
    errors.WeightUpdateError: f"{TROUBLESHOOTING}#the-servers-have-other-weights",
    errors.EpisodeError: f"{TROUBLESHOOTING}#all-episodes-fail",
    errors.ContextOverflowError: f"{TROUBLESHOOTING}#a-prompt-does-not-fit",
    errors.ServerError: f"{TROUBLESHOOTING}#a-server-answers-with-an-error",
    errors.EpisodeTimeoutError: "staleness.md#episodes-that-take-too-long",
    errors.LedgerError: "reliability.md#one-account-of-every-prompt",
    errors.RewardError: "data-and-rewards.md#data-and-a-reward",
    errors.TrajectoryError: "workflows.md#what-to-keep-to",
    errors.ParseError: "workflows.md#environments",
    errors.EnvError: "workflows.md#environments",
    errors.AgentError: "agents.md#what-it-may-ask",
    errors.AbandonedError: "agents.md#online-others-bring-the-work",
    errors.GroupLostError: "core.md#when-workers-die",
    errors.WorkerLostError: "core.md#when-workers-die",
}
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


def page_of(error: BaseException) -> str:
    """Return the page of an error, with the anchor of its section."""
    if page := page_of_message(str(error)):
        return page
    for kind in type(error).__mro__:
        if kind in CLASSES:
            return CLASSES[kind]
    files: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        files = [line.file for line in lines_of_error(cause)] + files
        cause = cause.__cause__
    return next(filter(None, map(page_of_file, files)), TROUBLESHOOTING)


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
            return [f"  more: {folder() / name}:{number} ({heading.lstrip('# ')})"]
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

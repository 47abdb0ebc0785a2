"""The findings of `arealite check`: printed at once, counted at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from rich.console import Console

from arealite.api.script import in_one_line

Level = Literal["ok", "warning", "problem"]
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}

P = ParamSpec("P")
T = TypeVar("T")


class Finding(NamedTuple):
    """A result of a check, and its fix."""

    level: Level
    text: str
    fix: str = ""


class Findings:
    """The findings of all checks so far."""

    def __init__(self, *, is_brief: bool = False) -> None:
        """Print everything, each finding as one line; if `is_brief`, only warnings and problems, on stderr."""
        self.is_brief = is_brief
        self.console = Console(highlight=False, stderr=is_brief)
        self.all: list[Finding] = []
        self._topic = "run"

    def look(
        self, topic: str, check: Callable[Concatenate[Findings, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run a check. Any error of a model, a data set or a server is a problem of the run."""
        self._topic = topic
        try:
            return check(self, *args, **kwargs)
        except (Exception, SystemExit) as error:  # a script may exit where it is imported
            self.add("problem", in_one_line(error))
        return None

    def add(self, level: Level, text: str, fix: str = "") -> None:
        """Print a finding of the current check, or of the run between checks."""
        self.all.append(Finding(level, text, fix))
        if level != "ok" or not self.is_brief:
            end = "" if text.endswith("?") else "."
            sentence = f"{level}: {self._topic}: {text.rstrip('.')}{end} {fix}"
            self.console.print(" ".join(sentence.split()), style=_STYLES[level], markup=False, soft_wrap=True)

    def summarize(self) -> bool:
        """Print the numbers of problems and warnings; return whether there are problems."""
        problems, warnings = (sum(finding.level == level for finding in self.all) for level in ("problem", "warning"))
        if not self.is_brief:
            self.console.print(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}", style="bold")
        return problems > 0


def counted(number: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

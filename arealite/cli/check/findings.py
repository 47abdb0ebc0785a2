"""The findings of `arealite check`: printed at once, counted at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec, TypeVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from arealite.api.script import in_one_line

Level = Literal["ok", "warning", "problem"]
_STYLES = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold white on red")}

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A result of a check, and its fix."""

    level: Level
    text: str
    fix: str = ""


class Findings:
    """The findings of all checks so far."""

    def __init__(self, *, is_brief: bool = False) -> None:
        """Print everything; if `is_brief`, only warnings and problems, each as one line, on stderr."""
        self.is_brief = is_brief
        self.console = Console(highlight=False, quiet=is_brief)
        self.all: list[Finding] = []
        self._topic = "run"

    def look(
        self, topic: str, check: Callable[Concatenate[Findings, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Run a check. Any error of a model, a data set or a server is a problem of the run."""
        self._topic = topic
        try:
            with self.console.status(f"checking the {topic}"):
                return check(self, *args, **kwargs)
        except (Exception, SystemExit) as error:  # a script may exit where it is imported
            self.add("problem", in_one_line(error))
        return None

    def add(self, level: Level, text: str, fix: str = "") -> None:
        """Print a finding of the current check, or of the run between checks."""
        self.all.append(Finding(level, text, fix))
        if self.is_brief and level != "ok":
            end = "" if text.endswith("?") else "."
            sentence = f"{level}: {self._topic}: {text.rstrip('.')}{end} {fix}"
            print(" ".join(sentence.split()), file=sys.stderr, flush=True)
        mark, style = _STYLES[level]
        line = Table.grid(Column(width=len("PROBLEM")), Column(width=9), Column(overflow="fold"), padding=(0, 1))
        line.add_row(Text(mark, style=style), Text(self._topic, style="bold"), Text(text))
        if fix:
            line.add_row("", "", Text(f"Fix: {fix}", style="cyan"))
        self.console.print(line)

    def summarize(self) -> bool:
        """Print the numbers of problems and warnings; return whether there are problems."""
        problems, warnings = (sum(finding.level == level for finding in self.all) for level in ("problem", "warning"))
        total = f"\n{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
        self.console.print(Text(total, style="bold red" if problems else "bold green"))
        return problems > 0


def counted(number: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

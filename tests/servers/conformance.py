"""Runs every check on every server, one server after the other, and shows one table."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from arealite.api.errors import AReaLiteError
from servers.checks import CHECKS, Check, NotApplicable
from servers.programs import Name, Program, program, served
from servers.subject import Laboratory, Subject, requests

Kind = Literal["pass", "fail", "refused", "n.a."]
_COLORS = {"pass": "green", "fail": "bold red", "refused": "yellow", "n.a.": "dim"}


@dataclass(frozen=True)
class Cell:
    """What came of one check on one server."""

    kind: Kind
    note: str = ""

    def __str__(self) -> str:
        return f"[{_COLORS[self.kind]}]{self.kind}[/] {self.note}".strip()


@dataclass
class Column:
    """What came of one server."""

    about: dict[str, Any]
    cells: dict[str, Cell] = field(default_factory=dict)
    num_updates: int = 0
    num_interrupts: int = 0
    num_restarts: int = 0
    wall_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return what the last line tells."""
        kinds = [cell.kind for cell in self.cells.values()]
        return {
            "program": self.about["program"],
            "version": self.about["version"],
            "weight_updates": self.num_updates,
            "interrupts": self.num_interrupts,
            "passed": kinds.count("pass"),
            "failed": kinds.count("fail"),
            "refused": kinds.count("refused"),
            "restarts": self.num_restarts,
            "seconds": round(self.wall_s),
        }


def run(folder: Path, pythons: Mapping[Name, str], *, only: str, short: bool) -> dict[str, Any]:
    """Try all servers, print the table and return what came of them."""
    laboratory = Laboratory(folder)
    checks = [check for check in CHECKS if only in check.name and not (short and check.is_in_place)]
    try:
        columns = {name: _try(program(name, python), laboratory, checks) for name, python in pythons.items()}
    finally:
        laboratory.close()
    table = Table("check", *(f"{name} {column.about['version']}" for name, column in columns.items()))
    for check in checks:
        table.add_row(check.name, *(str(column.cells[check.name]) for column in columns.values()))
    Console(width=150).print(table)
    summaries = {name: column.summary() for name, column in columns.items()}
    return {"failed": sum(one["failed"] for one in summaries.values()), "servers": summaries}


def _try(one: Program, laboratory: Laboratory, checks: list[Check]) -> Column:
    """Try one server; one that a check has broken is started anew for the others."""
    started = time.monotonic()
    column = Column(one.about(laboratory.models["first"]))
    print(f"{one.name}: {json.dumps(column.about)}", flush=True)
    for serving, is_in_place in ((one, False), (one.for_in_place, True)):
        _attempt_all(serving, [check for check in checks if check.is_in_place == is_in_place], laboratory, column)
    column.wall_s = time.monotonic() - started
    return column


def _attempt_all(serving: Program, checks: list[Check], laboratory: Laboratory, column: Column) -> None:
    """Start a server and fill in the cells of some checks."""
    while checks:
        started = time.monotonic()
        with served(serving, laboratory.models["first"], laboratory.folder / f"{serving.name}.log") as address:
            print(f"{serving.name}: ready after {time.monotonic() - started:.0f} s", flush=True)
            subject = Subject(serving, address, laboratory)
            while checks:
                check, *checks = checks
                check_started = time.monotonic()
                column.cells[check.name] = cell = _attempt(check, subject)
                wall_s = time.monotonic() - check_started
                print(f"{serving.name}: {wall_s:5.1f} s  {check.name}: {cell.kind} {cell.note}", flush=True)
                if cell.kind == "fail" and not _is_usable(subject):
                    column.num_restarts += 1
                    break
            column.num_updates += subject.num_updates
            column.num_interrupts += subject.num_interrupts


def _attempt(check: Check, subject: Subject) -> Cell:
    try:
        return Cell("pass", check.run(subject))
    except NotApplicable as reason:
        return Cell("n.a.", str(reason))
    except Exception as error:
        is_ours = isinstance(error, ValueError) and " must " in str(error)
        if check.may_refuse and (is_ours or getattr(error, "status", 0) == 400):
            return Cell("refused", str(error)[:200])
        if not isinstance(error, AssertionError | AReaLiteError):
            traceback.print_exc()
        return Cell("fail", f"{type(error).__name__}: {error}"[:400])


def _is_usable(subject: Subject) -> bool:
    """Tell whether the server still samples, after a publication that repairs what a failed check has left."""
    with contextlib.suppress(Exception), subject.client() as engine:
        subject.publish(engine, subject.other)
        return len(subject.complete(engine, requests(1, 4, greedy=True))[0].output_tokens) == 4
    return False

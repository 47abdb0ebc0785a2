"""`calls.jsonl`: time and workers of each call of a graph, and the idle share of the workers.

A resumed run drops the lines of steps that it repeats.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from arealite.utils.files import keep_rows, read_jsonl, reading, writing


@dataclass(frozen=True)
class CallRecord:
    """An attempt at a call; times in unix seconds."""

    step: int
    call: str
    role: str
    group: str
    """The workers' group."""
    begin: float
    end: float
    moved_mib: float
    """MiB that workers received and returned."""
    attempt: int
    """1, or more if the call was run again."""
    machines: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class CallState:
    """State of a call in the current step; times in unix seconds."""

    status: Literal["waiting", "running", "done", "replayed"] = "waiting"
    begin: float | None = None
    """Given unless the call is waiting."""
    end: float | None = None
    """Given if the call is done or replayed."""


@dataclass(frozen=True)
class Summary:
    """Totals of the calls of a step; times in unix seconds."""

    begin: float
    end: float
    """At least a millisecond later."""
    overlap: float
    moved_mib: float
    idle: Mapping[str, float]
    """By group, the share of this time in which its workers ran none of these calls."""


class CallLog:
    """Writes the file, from step `start_step` on; FileError if it can't be read, OSError if it can't be written."""

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        self._path = path
        keep_rows(path, "step", before=start_step)

    def append(self, record: CallRecord) -> None:
        """Add a line."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def read_calls(path: Path) -> list[CallRecord]:
    """Return the records of a file; without a file there are none."""
    names = [field.name for field in fields(CallRecord)]
    with reading(path):
        rows = [{name: row[name] for name in names} for row in read_jsonl(path)]
        return [CallRecord(**row | {"machines": tuple(row["machines"])}) for row in rows]


def summary(calls: Sequence[CallRecord], groups: Iterable[str]) -> Summary:
    """Sum up one or more calls of a step, which these groups of workers ran."""
    begin = min(call.begin for call in calls)
    end = max(begin + 1e-3, *(call.end for call in calls))
    idle = {group: 1.0 - _busy_s(call for call in calls if call.group == group) / (end - begin) for group in groups}
    return Summary(begin, end, overlap(calls), sum(call.moved_mib for call in calls), idle)


def overlap(records: Sequence[CallRecord]) -> float:
    """Return the seconds of all calls per second in which any ran: 1 without overlap, 0 without calls."""
    busy_s = _busy_s(records)
    return sum(record.seconds for record in records) / busy_s if busy_s else 0.0


def _busy_s(records: Iterable[CallRecord]) -> float:
    """Return the seconds in which any of the calls ran."""
    total, reached = 0.0, float("-inf")
    for record in sorted(records, key=lambda record: record.begin):
        total += max(0.0, record.end - max(record.begin, reached))
        reached = max(reached, record.end)
    return total

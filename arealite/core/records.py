"""`calls.jsonl`: when each call of a run with a graph ran, on which workers, and what share of the time they idled.

A resumed run drops the lines of steps that it redoes.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from arealite.utils.files import keep_rows, read_jsonl, reading, writing


@dataclass(frozen=True)
class CallRecord:
    """One attempt at a call; times in unix seconds."""

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
class Summary:
    """What the calls of a step come to; times in unix seconds."""

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
    names = [one.name for one in fields(CallRecord)]
    with reading(path):
        return [_record({name: row[name] for name in names}) for row in read_jsonl(path)]


def _record(row: dict[str, Any]) -> CallRecord:
    return CallRecord(**row | {"machines": tuple(row["machines"])})


def summary(calls: Sequence[CallRecord], groups: Iterable[str]) -> Summary:
    """Sum up one or more calls of a step, which these groups of workers ran."""
    begin = min(call.begin for call in calls)
    end = max(begin + 1e-3, *(call.end for call in calls))
    idle = {group: idle_share(calls, group, begin, end) for group in groups}
    return Summary(begin, end, overlap(calls), sum(call.moved_mib for call in calls), idle)


def overlap(records: Sequence[CallRecord]) -> float:
    """Return the seconds of all calls per second in which any ran: 1 without overlap, 0 without calls."""
    busy = _covered((record.begin, record.end) for record in records)
    return sum(record.seconds for record in records) / busy if busy else 0.0


def idle_share(records: Iterable[CallRecord], group: str, begin: float, end: float) -> float:
    """Return the share of the time from `begin` to `end` (unix seconds) in which no call of a group ran."""
    assert end > begin, (begin, end)
    inside = (
        (max(record.begin, begin), min(record.end, end))
        for record in records
        if record.group == group and record.begin < end and record.end > begin
    )
    return 1.0 - _covered(inside) / (end - begin)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total

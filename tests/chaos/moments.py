"""What a run does right now, read from its folder: faults land in chosen phases, at random delays after these marks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Moment = Literal["start", "resume", "batch", "published", "checkpoint", "step"]
"""The run starts or has been hit | rank 0 has taken the run folder, so a checkpoint is read and what came after it is
undone | a batch was handed out, so logprobs, update and publication follow | new weights are out, so a checkpoint is
copied | it is being written | a step is told, so the wait for the next batch follows, or the end."""
MOMENTS: tuple[Moment, ...] = get_args(Moment)
OF_NO_STEP: tuple[Moment, ...] = ("start", "resume")
SPAN_S: dict[Moment, float] = {
    "start": 14.0,
    "resume": 1.5,
    "batch": 0.8,
    "published": 0.2,
    "checkpoint": 0.15,
    "step": 0.6,
}
"""About how long the phase after each mark lasts: random delays are drawn from there."""


@dataclass(frozen=True)
class Mark:
    """A moment that has come."""

    moment: Moment
    step: int
    seen_at: float
    """Of time.monotonic."""


class Marks:
    """The marks seen so far; `look` often."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: dict[Moment, int] = {}
        self._owner = ""
        """Process that has taken the run folder."""
        self.seen: list[Mark] = []

    def add(self, moment: Moment, step: int) -> None:
        """Note a mark."""
        self.seen.append(Mark(moment, step, time.monotonic()))

    def look(self) -> None:
        """Note what has changed since the last look."""
        now: dict[Moment, int] = {
            "batch": _last_number(self._folder / "rollouts", "step_", ""),
            "checkpoint": _last_number(self._folder / "recover", ".step_", ".unfinished"),
            "published": _last_value(self._folder / "weights.jsonl", "version"),
            "step": _last_value(self._folder / "metrics.jsonl", "step"),
        }
        for moment, step in now.items():
            if step >= 0 and step != self._last.get(moment, -1):
                self.add(moment, step)
        self._last = now
        owner = _text(self._folder / ".trainer.lock")
        if owner != self._owner and owner:
            self.add("resume", -1)
        self._owner = owner or self._owner

    @property
    def newest(self) -> str:
        """Describe the newest mark."""
        mark = self.seen[-1]
        name = mark.moment if mark.moment in OF_NO_STEP else f"{mark.moment} {mark.step}"
        return f"{time.monotonic() - mark.seen_at:.2f} s after {name}"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _last_number(folder: Path, start: str, end: str) -> int:
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder)
    numbers = [name.removeprefix(start).removesuffix(end) for name in names if name.startswith(start)]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _last_value(path: Path, key: str) -> int:
    """Return a value of the last whole line of a file of JSON objects."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 20_000))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return -1
    return int(json.loads(lines[-1])[key]) if lines else -1

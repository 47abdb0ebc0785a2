"""Story problems in the shape of GSM8K, generated: who has how many of what after several small events.

A row is a pure function of the options and its position. A question is held out when the CRC-32 of its text is 0
modulo 8, so training and test questions never meet, whatever the seeds. Every total stays in 0..18 and every change
in 2..9: each written step is easy, while adding up four or five of them at once is not. `with_steps` of the answers
write the steps, day by day, before `#### N`; the others jump to it. A model fitted to such a mixture can do the steps
but seldom does, and reinforcement learning discovers that writing them pays.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

MIN_CHANGE, MAX_CHANGE, MAX_TOTAL = 2, 9, 18
TEST_SHARE = 8
MAX_ROWS = 200_000

NAMES = (("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"), ("Lily", "she"), ("Sam", "he"))
FRIENDS = ("Ella", "Max", "Nina", "Paul")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "toys")
# Every event has a day and its step names it, so that a tiny model finds the number to add by looking the day up.
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPENINGS = ("{name} has {n} {things}.", "{name} owns {n} {things}.", "{name} counts {n} {things}.")
GAINS = (
    "On {day} {he} finds {n} more.",
    "On {day} {he} buys {n} more.",
    "On {day} {he} gets {n} more.",
    "On {day} {he} wins {n} {things}.",
    "On {day} {friend} brings {n} more.",
    "On {day} {friend} adds {n} {things}.",
)
LOSSES = (
    "On {day} {he} loses {n} {things}.",
    "On {day} {he} gives {n} away.",
    "On {day} {he} sells {n} {things}.",
    "On {day} {he} drops {n} {things}.",
    "On {day} {friend} takes {n} away.",
    "On {day} {friend} borrows {n} {things}.",
)
QUESTIONS = ("How many {things} are left?", "How many {things} remain now?")


@dataclass(frozen=True)
class StoryOptions:
    """What `story?train=20000&steps=4-5` selects."""

    train: int = 20000
    """Rows of the training split."""
    test: int = 512
    """Rows of the test split."""
    steps: str = "4-5"
    """How many events a story has: a number or a range."""
    with_steps: float = 0.35
    """Share of the answers that write the steps."""

    @classmethod
    def from_query(cls, query: str) -> StoryOptions:
        """Parse `key=value&key=value`."""
        parsers: dict[str, Callable[[str], Any]] = {"train": int, "test": int, "steps": str, "with_steps": float}
        given = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key not in parsers:
                raise ValueError(
                    f"options of story must be among {', '.join(parsers)}: got {key!r}. Rename or drop it."
                )
            try:
                given[key] = parsers[key](value)
            except ValueError:
                raise ValueError(f"story option {key} must be a number: got {value!r}. Write one.") from None
        return cls(**given)

    def __post_init__(self) -> None:
        least, most = self.steps_range
        if not 1 <= least <= most <= len(DAYS):
            raise ValueError(f"story option steps must lie in 1..{len(DAYS)}: got {self.steps!r}. Use steps=4-5.")
        if not 0 <= self.with_steps <= 1:
            raise ValueError(
                f"story option with_steps must be a share of 0 to 1: got {self.with_steps}. Write e.g. 0.35."
            )
        if not (1 <= self.train <= MAX_ROWS and 1 <= self.test <= MAX_ROWS):
            raise ValueError(
                f"story options train and test must lie in 1..{MAX_ROWS}: got {self.train} and {self.test}. Use 512."
            )

    @property
    def steps_range(self) -> tuple[int, int]:
        """Fewest and most events."""
        least, _, most = self.steps.partition("-")
        if not least.isdecimal() or not (most or least).isdecimal():
            raise ValueError(f"story option steps must be N or N-M: got {self.steps!r}. Write e.g. steps=4-5.")
        return int(least), int(most or least)


def story_rows(options: StoryOptions, split: str, *, seed: int) -> list[dict[str, Any]]:
    """Generate the rows of a split: question and answer, no question twice."""
    counts = {"train": options.train, "test": options.test}
    if split not in counts:
        raise ValueError(f"split of story must be train or test: got {split!r}. Use one of them.")
    rows: dict[str, str] = {}
    for question, answer in _problems(options, random.Random(f"story-{seed}")):
        if is_held_out(question) == (split == "test"):
            rows.setdefault(question, answer)
            if len(rows) == counts[split]:
                break
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def is_held_out(question: str) -> bool:
    """Tell whether a question belongs to the test split."""
    return zlib.crc32(question.encode()) % TEST_SHARE == 0


def _problems(options: StoryOptions, draw: random.Random) -> Iterator[tuple[str, str]]:
    least, most = options.steps_range
    while True:
        changes, totals = _changes(draw, draw.randint(least, most))
        question = _tell(draw, changes)
        yield question, _answer(totals, changes, is_written_out=draw.random() < options.with_steps)


def _changes(draw: random.Random, num_steps: int) -> tuple[list[int], list[int]]:
    """Draw the opening number followed by signed changes, no size twice, and the running totals."""
    sizes = draw.sample(range(MIN_CHANGE, MAX_CHANGE + 1), num_steps + 1)
    changes, totals = [sizes[0]], [sizes[0]]
    for size in sizes[1:]:
        fitting = [change for change in (size, -size) if 0 <= totals[-1] + change <= MAX_TOTAL]
        changes.append(draw.choice(fitting))
        totals.append(totals[-1] + changes[-1])
    return changes, totals


def _tell(draw: random.Random, changes: list[int]) -> str:
    name, he = draw.choice(NAMES)
    words = {"name": name, "he": he, "things": draw.choice(THINGS)}
    sentences = [draw.choice(OPENINGS).format(n=changes[0], **words)]
    for day, change in zip(DAYS, changes[1:]):
        event = draw.choice(GAINS if change > 0 else LOSSES)
        sentences.append(event.format(day=day, n=abs(change), friend=draw.choice(FRIENDS), **words))
    return " ".join([*sentences, draw.choice(QUESTIONS).format(**words)])


def _answer(totals: list[int], changes: list[int], *, is_written_out: bool) -> str:
    steps = [
        f"{day}: {before}{change:+d}={after}"
        for day, before, change, after in zip(DAYS, totals[:-1], changes[1:], totals[1:])
    ]
    return "\n".join([*(steps if is_written_out else []), f"#### {totals[-1]}"])

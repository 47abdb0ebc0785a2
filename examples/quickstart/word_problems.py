"""Generated word problems in the format of GSM8K: how many things a person has after several small events.

A row is a pure function of the options, the seed and its position. A question is held out when the CRC-32 of its text
is 0 modulo 8, so training and test questions never meet, whatever the seeds. Every total stays in 0..18 and every
change in 2..9: each written step is easy, while adding up four or five of them at once is not. A share of the answers
writes the steps, day by day, before `#### N`; the others jump to it. A model fitted to such a mixture can write steps
but rarely does; reinforcement learning makes it write them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

PATH = f"{__file__}:rows"
"""Value of `train_dataset.path`; options may follow, e.g. `?train=200&test=10`."""
CURRICULUM = f"{__file__}:curriculum"
MIN_CHANGE, MAX_CHANGE, MAX_TOTAL = 2, 9, 18
TEST_SHARE = 8
MAX_ROWS = 200_000

NAMES = (("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"), ("Lily", "she"), ("Sam", "he"))
FRIENDS = ("Ella", "Max", "Nina", "Paul")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "toys")
# Every event has a day and its step names the day, so that a tiny model can look up the number to add.
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


def rows(
    split: str,
    *,
    seed: int,
    train: int | str = 20000,
    test: int | str = 512,
    steps: int | str = "4-5",
    with_steps: float | str = 0.35,
) -> list[dict[str, str]]:
    """Generate the rows of a split: question and answer, no question twice.

    A split has `train` or `test` rows, a problem has `steps` events (a number or a range), and `with_steps` is the
    share of answers that write them.
    """
    counts = {"train": _integer("train", train), "test": _integer("test", test)}
    least, most = _range(str(steps))
    if split not in counts:
        raise ValueError(f"split of the word problems must be train or test: got {split!r}. Use one of them.")
    try:
        share = float(with_steps)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"option with_steps must be a share of 0 to 1: got {with_steps}. Write e.g. 0.35.")
    found: dict[str, str] = {}
    for question, answer in _problems(least, most, share, random.Random(f"story-{seed}")):
        if is_held_out(question) == (split == "test"):
            found.setdefault(question, answer)
            if len(found) == counts[split]:
                break
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def curriculum(split: str, *, seed: int, written: int | str = 9600, **options: int | str) -> list[dict[str, str]]:
    """Generate `rows` in the order to learn from: answers of the first `written` training rows all write the steps.

    A model that can write them learns within few rows that it mostly need not.
    """
    mixed = rows(split, seed=seed, **options)
    first = _integer("written", written) if split == "train" else 0
    return rows(split, seed=seed, **options | {"with_steps": 1})[:first] + mixed[first:]


def pairs(split: str, *, seed: int, **options: int | str) -> list[dict[str, str]]:
    """Generate pairs of answers: an answer with steps is preferred to one that jumps to the result."""
    written = rows(split, seed=seed, with_steps=1, **options)
    return [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": row["answer"].splitlines()[-1]}
        for row in written
    ]


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to the test split."""
    return zlib.crc32(question.encode()) % TEST_SHARE == 0


def _integer(name: str, value: int | str) -> int:
    if not str(value).isdecimal() or not 1 <= int(value) <= MAX_ROWS:
        raise ValueError(f"option {name} must be a number in 1..{MAX_ROWS}: got {value!r}. Use 512.")
    return int(value)


def _range(steps: str) -> tuple[int, int]:
    """Return the minimum and maximum number of events."""
    least, _, most = steps.partition("-")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ValueError(f"option steps must be N or N-M: got {steps!r}. Write e.g. steps=4-5.")
    if not 1 <= int(least) <= int(most or least) <= len(DAYS):
        raise ValueError(f"option steps must lie in 1..{len(DAYS)}: got {steps!r}. Use steps=4-5.")
    return int(least), int(most or least)


def _problems(least: int, most: int, with_steps: float, draw: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        changes, totals = _changes(draw, draw.randint(least, most))
        question = _tell(draw, changes)
        yield question, _answer(totals, changes, is_written_out=draw.random() < with_steps)


def _changes(draw: random.Random, num_steps: int) -> tuple[list[int], list[int]]:
    """Draw the initial number and signed changes of different sizes, and return them with the running totals."""
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

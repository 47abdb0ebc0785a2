"""Generated posts with summaries, in the format of the TL;DR data sets trl-lib/tldr and trl-lib/tldr-preference.

A row is a pure function of the seed and its position. Posts of the test split are about other people than those of the
train split.
"""

from __future__ import annotations

import itertools
import random

SPLITS = {"train": ("Mia", "Tom", "Ana", "Ben", "Lily"), "test": ("Sam", "Eva")}
RELATIONS = ("sister", "brother", "roommate", "boss", "neighbour", "cousin")
DEEDS = ("broke my bike", "ate my lunch", "lost my keys", "sold my guitar", "painted my door", "forgot my birthday")
WISHES = ("an apology", "some money", "a talk", "advice", "a quiet week", "to move out")
FILLERS = (
    "I don't know what to do.",
    "This has been going on for weeks.",
    "We used to get along well.",
    "My friends say that I should let it go.",
    "Sorry for the long story.",
)


def rows(split: str, *, seed: int, train: int | str = 2000, test: int | str = 128) -> list[dict[str, str]]:
    """Generate `train` or `test` rows of a split: `prompt`, a post and the request of a summary, and `completion`."""
    if split not in SPLITS:
        raise ValueError(f"split of the posts must be train or test: got {split!r}. Use one of them.")
    stories = list(itertools.product(SPLITS[split], RELATIONS, DEEDS, WISHES))
    draw, num_rows = random.Random(f"posts-{seed}-{split}"), int({"train": train, "test": test}[split])
    return [_row(draw, *draw.choice(stories)) for _ in range(num_rows)]


def pairs(split: str, *, seed: int, **options: int | str) -> list[dict[str, str]]:
    """Generate pairs of summaries: one of the whole story is preferred to a filler sentence of the post."""
    draw = random.Random(f"pairs-{seed}-{split}")
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f" {draw.choice(FILLERS)}"}
        for row in rows(split, seed=seed, **options)
    ]


def _row(draw: random.Random, name: str, relation: str, deed: str, wish: str) -> dict[str, str]:
    sentences = [f"My {relation} {name} {deed}.", f"I want {wish}.", *draw.sample(FILLERS, 2)]
    draw.shuffle(sentences)
    post = f"SUBREDDIT: r/advice\n\nTITLE: My {relation} and I\n\nPOST: {' '.join(sentences)}\n\nTL;DR:"
    return {"prompt": post, "completion": f" {name}, my {relation}, {deed}; I want {wish}."}

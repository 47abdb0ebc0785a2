"""Generated images of coloured squares to count, in the format of the data set BUAADreamer/clevr_count_70k.

A row is a pure function of the seed and its position: `images` (PNG), `problem`, `answer`, such as [4].
"""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

SIDE, CELL = 56, 14
MOST = 6
COLOURS = ("red", "green", "blue", "yellow", "cyan", "magenta")
SPLITS = ("train", "test")


def rows(split: str, *, seed: int, train: int | str = 2000, test: int | str = 128) -> list[dict[str, object]]:
    """Generate `train` or `test` rows of a split."""
    if split not in SPLITS:
        raise ValueError(f"split of the shapes must be train or test: got {split!r}. Use one of them.")
    draw = random.Random(f"shapes-{seed}-{split}")
    return [_row(draw) for _ in range(int({"train": train, "test": test}[split]))]


def _row(draw: random.Random) -> dict[str, object]:
    number = draw.randint(1, MOST)
    picture = Image.new("RGB", (SIDE, SIDE), "black")
    canvas = ImageDraw.Draw(picture)
    for cell in draw.sample(range((SIDE // CELL) ** 2), number):
        left, top = (
            cell % (SIDE // CELL) * CELL + draw.randint(1, 3),
            cell // (SIDE // CELL) * CELL + draw.randint(1, 3),
        )
        canvas.rectangle((left, top, left + 9, top + 9), fill=draw.choice(COLOURS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return {"images": [{"bytes": file.getvalue()}], "problem": "<image>How many squares?", "answer": f"[{number}]"}

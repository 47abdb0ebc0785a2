"""The order of prompts, a pure function of a few numbers.

A *cursor* `{epoch, position, seed, dataset_size, batch_size, shuffle, drop_last}` identifies all prompts before it.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any


def order_of_epoch(dataset_size: int, *, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """Return the indices of a data set in the order of an epoch."""
    order = list(range(dataset_size))
    if shuffle:
        random.Random(f"prompts-{seed}-{epoch}").shuffle(order)
    return order


def length_of_epoch(dataset_size: int, *, batch_size: int, drop_last: bool) -> int:
    """Return the number of prompts of an epoch; `drop_last` skips the last, incomplete batch."""
    return dataset_size // batch_size * batch_size if drop_last else dataset_size


def cursor_after(count: int) -> dict[str, Any]:
    """Return the cursor after the prompts (0, 0) to (0, count - 1)."""
    data = {"seed": 0, "dataset_size": count, "batch_size": 1, "shuffle": False, "drop_last": False}
    return {"epoch": 0, "position": count, **data}


def passed_prompts(cursor: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield epoch and index of every prompt before a cursor, in the order of the run."""
    size, last_epoch = cursor["dataset_size"], cursor["epoch"]
    length = length_of_epoch(size, batch_size=cursor["batch_size"], drop_last=cursor["drop_last"])
    for epoch in range(last_epoch + 1):
        order = order_of_epoch(size, epoch=epoch, seed=cursor["seed"], shuffle=cursor["shuffle"])
        yield from ((epoch, index) for index in order[: cursor["position"] if epoch == last_epoch else length])

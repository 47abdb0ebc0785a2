"""Rows of reasoning-gym: `reasoning_gym:TASK?size=2000&level=1&option=value`.

Each row has the question, the answer, the name of the task, and the whole entry, which its scorer takes.
"""

import re
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import yaml

from arealite.api.config.data import GYM
from arealite.dataset.rows import Row
from arealite.utils import heartbeat

_SIZE = 1000
_LEVELS = re.compile(r"(\d+)(?:-(\d+))?")


def gym_rows(path: str, split: str, seed: int) -> list[Row]:
    """Return the rows of a task, of other seeds in each split; with levels from the easiest to the hardest.

    Raises ValueError for a task or an option that the library does not have, or that it refuses.
    """
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ImportError("reasoning-gym must be installed for its tasks: pip install 'arealite[gym]'.") from error
    task, _, query = path.removeprefix(GYM).partition("?")
    if task not in factory.DATASETS:
        near = f"one of {', '.join(sorted(factory.DATASETS))}"
        raise ValueError(f"dataset {path} must name a task of reasoning-gym, {near}: got {task}. Correct it.")
    options = {key: yaml.safe_load(text) for key, text in parse_qsl(query)}
    seed = zlib.crc32(f"{options.pop('seed', seed)}/{split}".encode()) >> 2  # seeds side by side have rows in common
    try:
        parts = [*_parts(factory, task, options, seed)]
        return [{**row, "task": task} for level, part in parts for row in _rows(part, level)]
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"dataset {path} must have options that {task} takes: got {error}. Correct them.") from error


def _parts(factory: Any, task: str, options: dict[str, Any], seed: int) -> Iterator[tuple[int | None, Any]]:
    """Yield levels and data sets of these levels, or the one data set of the options."""
    size, levels = int(options.pop("size", _SIZE)), str(options.pop("level", ""))
    if not levels:
        yield None, factory.create_dataset(task, seed=seed, size=size, **options)
        return
    if (match := _LEVELS.fullmatch(levels)) is None:
        raise ValueError(f"level={levels}, which must be like 2 or 0-3")
    first, last = int(match[1]), int(match[2] or match[1])
    curriculum, num_levels = factory.create_curriculum(task), last - first + 1
    for level in range(first, last + 1):
        curriculum.set_global_level(level)
        share = (level - first + 1) * size // num_levels - (level - first) * size // num_levels
        config = curriculum.generate_configuration({"seed": seed + size * level, "size": share, **options})
        yield level, factory.create_dataset(task, **vars(config))


def _rows(entries: Any, level: int | None) -> Iterator[Row]:
    for entry in entries:
        heartbeat.tick()
        answer = "" if entry["answer"] is None else entry["answer"]  # any that solves the task
        row = {"question": entry["question"], "answer": answer, "entry": entry}
        yield row if level is None else {**row, "level": level}

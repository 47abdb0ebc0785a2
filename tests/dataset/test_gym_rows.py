"""Rows of reasoning-gym: the library's own entries, other ones in each split, and levels from easy to hard."""

from __future__ import annotations

import zlib

import pytest
import reasoning_gym

from arealite.api.cli_args import DatasetConfig
from arealite.dataset import get_custom_dataset
from arealite.dataset.gym import gym_rows
from arealite.dataset.loader import Mixture, names_of, other_sources, weights_of
from arealite.dataset.rows import Rows


def test_rows_are_the_entries_of_the_library_with_their_types() -> None:
    rows = get_custom_dataset("reasoning_gym:arc_agi?size=3", 0, 1, type="rl")
    entry = rows[0]["entry"]
    expected = reasoning_gym.create_dataset("arc_agi", size=1, seed=entry_seed("arc_agi?size=3"))[0]
    assert entry == expected and isinstance(entry["metadata"]["output"], tuple)
    assert (rows[0]["question"], rows[0]["answer"], rows[0]["task"]) == (entry["question"], entry["answer"], "arc_agi")
    assert rows[0]["messages"] == [{"role": "user", "content": entry["question"]}]


def test_tasks_with_many_right_answers_have_none_in_their_rows() -> None:
    (row,) = get_custom_dataset("reasoning_gym:graph_color?size=1", 0, 1, type="rl")
    assert (row["answer"], row["entry"]["answer"]) == ("", None)


def entry_seed(text: str) -> int:
    """Return the seed of the library that a split's rows begin with."""
    return zlib.crc32(b"1/train") >> 2


def test_splits_and_seeds_share_no_rows_and_equal_ones_share_all() -> None:
    path = "reasoning_gym:countdown?size=40"
    first, again = ([row["question"] for row in gym_rows(path, "train", 1)] for _ in range(2))
    assert first == again and len({*first}) == 40
    for split, seed in (("test", 1), ("train", 2)):
        assert not {*first} & {row["question"] for row in gym_rows(path, split, seed)}


def test_options_of_the_task_and_levels_from_easy_to_hard() -> None:
    (row,) = gym_rows("reasoning_gym:chain_sum?size=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1", "train", 1)
    assert row["entry"]["metadata"]["difficulty"] == {"num_terms": (2, 2), "num_digits": (1, 1)}
    rows = gym_rows("reasoning_gym:countdown?size=7&level=0-2", "train", 1)
    assert [row["level"] for row in rows] == [0, 0, 1, 1, 2, 2, 2]
    assert len({row["question"] for row in rows}) == 7


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("reasoning_gym:nosuch", "must name a task of reasoning-gym, one of .*countdown.*: got nosuch"),
        (
            "reasoning_gym:countdown?wrong=1",
            "options that countdown takes: got .*unexpected keyword.*'wrong'",
        ),
        ("reasoning_gym:countdown?min_numbers=0", "must have options that countdown takes: got min_numbers must be"),
        ("reasoning_gym:acre?level=1", "must have options that acre takes: got No curriculum registered"),
        ("reasoning_gym:countdown?level=x", "got level=x, which must be like 2 or 0-3"),
        ("reasoning_gym:countdown?size=0", "countdown"),
    ],
)
def test_tasks_and_options_that_are_not_there_are_refused(path: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        get_custom_dataset(path, 0, 1, type="rl")


def test_a_mixture_weighs_tasks() -> None:
    config = DatasetConfig(
        path="reasoning_gym:chain_sum?size=30",
        weight=2,
        mixed_with=[{"path": "reasoning_gym:countdown?size=30", "weight": 1}],
    )
    parts = [Rows(gym_rows(one.path, "train", 1)) for one in (config, *other_sources(config))]
    mixture = Mixture(parts, weights_of(config), 1, names_of(config))
    tasks = [row["task"] for row in mixture]
    assert (tasks.count("chain_sum"), tasks.count("countdown")) == (40, 20)
    assert names_of(config) == ["chain_sum", "countdown"]

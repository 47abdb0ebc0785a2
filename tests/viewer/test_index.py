import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_rollouts import stored_rows, write_rows
from testing_views import row

from arealite.api.errors import ConfigError
from arealite.rollout.account.rollout_file import update_file
from arealite.rollout.account.store import Update, write_update
from arealite.viewer.index import RowIndex, StaleIndexError


def grown(folder: Path) -> RowIndex:
    index = RowIndex(folder)
    assert index.grow(60.0)
    return index


def write_steps(folder: Path, *steps: int) -> Path:
    for step in steps:
        write_rows(folder / f"step_{step}", [row(f"0-{step}", step=step, sample=sample) for sample in range(2)])
    return folder


TOKENS = st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=6)


@given(st.lists(st.one_of(st.none(), TOKENS), min_size=1, max_size=8))
def test_columns_are_those_of_a_slow_count(rows: list[list[tuple[bool, int]] | None]) -> None:
    """Of rows without tokens, without sampled ones, and of those that are not stored, too."""
    stored = [
        {
            "prompt_id": f"0-{i}", "reward": float(i),
            "input_ids": tokens and [5] * len(tokens), "logprobs": tokens and [0.0] * len(tokens),
            "loss_mask": tokens and [int(sampled) for sampled, _ in tokens],
            "versions": tokens and [version if sampled else -1 for sampled, version in tokens],
        }
        for i, tokens in enumerate(rows)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "step_7", [row("0-0", step=7), *stored])
        columns = grown(Path(name)).columns(0, 1)
    sampled = [[version for is_sampled, version in tokens or () if is_sampled] for tokens in rows]
    assert columns["sampled"].tolist() == [len(versions) for versions in sampled]
    assert columns["tokens"].tolist() == [len(tokens or ()) for tokens in rows]
    assert columns["staleness"].tolist() == [7 - min(versions) if versions else -1 for versions in sampled]
    assert columns["reward"].tolist() == [*range(len(rows))]
    assert columns["prompt_id"] == [f"0-{i}" for i in range(len(rows))]


def test_steps_come_in_their_order_and_evaluations_are_never_stale(tmp_path: Path) -> None:
    write_steps(tmp_path, 10, 2)
    write_rows(tmp_path / "eval_step_4", [row("0-0", step=2)])
    columns = grown(tmp_path).columns(0, 0)
    assert columns["names"] == [("eval_step_4", 1), ("step_2", 2), ("step_10", 2)]
    assert columns["step"].tolist() == [4, 2, 2, 10, 10]
    assert columns["staleness"].tolist() == [-1, 0, 0, 0, 0]


def test_completions_that_ended_at_the_limit_are_truncated(tmp_path: Path) -> None:
    cut = [row(f"0-{i}", step=0, more={"no_eos": i == 1}) for i in range(3)]
    write_rows(tmp_path / "step_0", [*cut, row("0-3", step=0)])
    write_rows(tmp_path / "step_1", [row("0-4", step=1)])
    write_rows(tmp_path / "step_2", [row("0-5", step=2, more={"other": 1})])
    index = grown(tmp_path)
    assert index.problems == []
    assert index.columns(0, 0)["truncated"].tolist() == [False, True, False, False, False, False]


def test_a_run_that_trains_grows_under_the_same_numbers(tmp_path: Path) -> None:
    index = RowIndex(tmp_path / "rollouts")
    assert index.grow(60.0) and len(index) == 0
    for step in range(4):
        write_steps(tmp_path / "rollouts", step)
        assert index.grow(60.0)
        columns = index.columns(0, 2 * step)
        assert (columns["generation"], columns["start"], columns["step"].tolist()) == (0, 2 * step, [step, step])
    write_rows(tmp_path / "rollouts/step_3", [row("0-9", step=3)])  # another batch of the same step
    assert index.grow(60.0)
    assert index.columns(0, 8)["prompt_id"] == ["0-9"]
    assert index.row(0, 0)["prompt_id"] == "0-0"


def test_a_file_within_a_tick_of_the_clock_is_found(tmp_path: Path) -> None:
    """The folder's time tells nothing then."""
    index = grown(write_steps(tmp_path, 0))
    before = (tmp_path / "step_0").stat()
    write_rows(tmp_path / "step_0", [row("0-9", step=0)])
    os.utime(tmp_path / "step_0", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert index.grow(60.0)
    assert index.columns(0, 2)["prompt_id"] == ["0-9"]


def test_a_slice_ends_and_says_that_there_is_more(tmp_path: Path) -> None:
    index = RowIndex(write_steps(tmp_path, 0, 1, 2))
    assert [index.grow(0.0) for _ in range(3)] == [False, False, True]
    assert len(index) == 6


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_run_that_resumes_gives_new_numbers(tmp_path: Path, is_written_again: bool) -> None:
    index = grown(write_steps(tmp_path, 0, 1, 2))
    shutil.rmtree(tmp_path / "step_2")
    if is_written_again:
        write_rows(tmp_path / "step_2", [row("0-7", step=2), row("0-8", step=2)])
    assert index.grow(60.0)
    for ask in (lambda: index.row(0, 5), lambda: index.snippets(0, [5]), lambda: index.search(0, "a", range(9), 1.0)):
        with pytest.raises(StaleIndexError, match="got generation 0 of 1"):
            ask()
    columns = index.columns(0, 4)
    assert (columns["generation"], columns["start"]) == (1, 0)
    assert columns["prompt_id"][4:] == (["0-7", "0-8"] if is_written_again else [])


def test_folders_that_go_away_meanwhile_are_no_error(tmp_path: Path) -> None:
    """A run that resumes removes steps at any time."""
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            for step in range(20):
                (tmp_path / f"step_{step}").mkdir()
            for step in range(20):
                (tmp_path / f"step_{step}").rmdir()

    with ThreadPoolExecutor() as pool:
        going = pool.submit(come_and_go)
        try:
            index = RowIndex(tmp_path)
            for _ in range(500):
                assert index.grow(60.0)
        finally:
            is_over.set()
        going.result(120)


def test_a_damaged_file_is_named_and_hides_no_other(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1, 2)
    (damaged := tmp_path / "step_1/0.parquet").write_bytes(b"PAR1")
    index = grown(tmp_path)
    assert index.columns(0, 0)["step"].tolist() == [0, 0, 2, 2]
    (problem,) = index.problems
    assert problem.startswith(f"{damaged} must be as its writer left it")
    assert index.row(0, 3) == {"name": "step_2", "update": {}, "problems": []} | stored_rows(tmp_path / "step_2")[1]


def test_one_row_of_a_large_batch(tmp_path: Path) -> None:
    """Row groups end at 256, 512 and 600."""
    write_rows(tmp_path / "step_0", [row(f"0-{i}", step=0, sampled=f"answer {i}") for i in range(600)])
    write_rows(tmp_path / "step_1", [row("0-600", step=1, sampled="answer 600")])
    index = grown(tmp_path)
    numbers = [0, 255, 256, 511, 512, 599, 600]
    assert [index.row(0, number)["prompt_id"] for number in numbers] == [f"0-{number}" for number in numbers]
    assert index.snippets(0, numbers) == [f"answer {number}" for number in numbers]
    for number in (-1, 601):
        with pytest.raises(ConfigError, match=f"a row must be in 0 .. 600: got {number}"):
            index.row(0, number)


def test_long_rows_have_groups_of_their_own(tmp_path: Path) -> None:
    """A row costs the decoding of its group; numbers of its update are in groups of another size."""
    num_tokens = 20_006
    write_rows(tmp_path / "step_0", [row(f"0-{i}", step=0, sampled=f"{i % 10}" * 20_000) for i in range(24)])
    of_row = np.repeat(np.arange(24.0, dtype="f4"), num_tokens)
    update = Update([*range(24)], [num_tokens] * 24, dict.fromkeys(("advantages", "log_ratio", "logprob_gap"), of_row))
    write_update(file := tmp_path / "step_0/0.parquet", [update], [True] * 24)
    assert pq.ParquetFile(file).num_row_groups > pq.ParquetFile(update_file(file)).num_row_groups > 1
    index = grown(tmp_path)
    for row_, number in zip(index.rows(0, [0, 7, 8, 23]), [0, 7, 8, 23]):
        assert (row_["prompt_id"], set(row_["update"]["advantages"])) == (f"0-{number}", {float(number)})


def found(index: RowIndex, text: str, rows: range, seconds: float = 60.0) -> tuple[list[int], int]:
    numbers, end = index.search(0, text, rows, seconds)
    return sorted(numbers), end


def test_text_is_found_in_what_was_given_and_sampled(tmp_path: Path) -> None:
    texts: list[dict[str, Any]] = [{"given": "Has Äpfel?"}, {"sampled": "has none"}, {"given": "a.s"}, {"sampled": "x"}]
    write_rows(tmp_path / "step_0", [row(f"0-{i}", step=0, **one) for i, one in enumerate(texts)])
    not_stored = dict.fromkeys(("segments", "input_ids", "loss_mask", "logprobs", "versions"))
    write_rows(tmp_path / "step_1", [row("0-4", step=1, given="HAS"), row("0-5", step=1) | not_stored])
    index = grown(tmp_path)
    assert index.problems == []
    assert found(index, "nothing of it", range(6)) == ([], 0)
    assert found(index, "has", range(6)) == ([0, 1, 4], 0)
    assert found(index, "äPFEL", range(4)) == ([0], 0)
    assert found(index, "a.s", range(4)) == ([2], 0), "a text is no pattern"


def test_a_search_takes_slices_from_the_end(tmp_path: Path) -> None:
    index = grown(write_steps(tmp_path, 0, 1, 2))
    assert found(index, "2", range(6), 0.0) == ([4, 5], 4)
    assert found(index, "2", range(4), 0.0) == ([2, 3], 2)
    assert found(index, "2", range(2), 0.0) == ([0, 1], 0)
    assert found(index, "2", range(3, 5)) == ([3, 4], 3)

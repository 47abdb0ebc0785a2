"""Rows that stay in their file are exactly what the file says, wherever and in whatever order they are asked for."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.api.cli_args import DatasetConfig
from arealite.dataset.loader import PromptLoader
from arealite.dataset.rows import CHUNK, Rows
from arealite.dataset.sources import read_rows

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OBJECTS = st.dictionaries(TEXTS, st.none() | TEXTS | st.integers() | st.dictionaries(TEXTS, TEXTS), max_size=3)
BREAKS = st.sampled_from(["\n", "\r\n", "\r", "\n\n", "\n \r\n", "\n\u3000\n"])


def lines_of(path: Path) -> Rows:
    return read_rows(DatasetConfig(path=str(path)), "train", 1)


@settings(max_examples=30)
@given(st.lists(st.tuples(OBJECTS, st.booleans(), BREAKS), max_size=12), st.booleans(), st.data())
def test_lines_are_those_of_the_text(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, ends: bool, data: Any
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=ascii) + end for row, ascii, end in rows]
    text = "".join(lines) if ends else "".join(lines).rstrip("\r\n")
    path.write_bytes(text.encode())
    with path.open(encoding="utf-8") as file:
        expected = [json.loads(line) for line in file if line.strip()]
    if not expected:
        return
    found = lines_of(path)
    assert len(found) == len(expected) and [*found] == expected
    start, stop = (data.draw(st.integers(-15, 15)) for _ in range(2))
    step = data.draw(st.sampled_from([1, 2, -1]))
    part = found[start:stop:step]
    assert [*part] == expected[start:stop:step] == [part[index] for index in range(len(part))]


@settings(max_examples=10)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_splits_are_the_sum_of_their_parts(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: Any
) -> None:
    """Also of files in several formats."""
    folder, chosen, expected = tmp_path_factory.mktemp("splits"), [], []
    for part, length in enumerate(lengths):
        rows = [{"at": [part, index]} for index in range(length + 1)]
        if part % 3 == 0:
            (folder / f"part{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif part % 3 == 1:
            (folder / f"part{part}.json").write_text(json.dumps(rows))
        else:
            datasets.Dataset.from_list(rows).to_parquet(folder / f"part{part}.parquet")
        start = data.draw(st.integers(0, length))
        chosen.append(f"part{part}[{start}:]")
        expected += rows[start:]
    found = read_rows(DatasetConfig(path=str(folder)), "+".join(chosen), 1)
    assert [*found] == expected
    with pytest.raises(IndexError):
        found[len(expected)]


def test_more_rows_than_are_read_at_a_time(tmp_path: Path) -> None:
    rows = [{"n": n, "nested": [{"only": n}] if n % 2 else []} for n in range(2 * CHUNK + 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for found in (lines_of(tmp_path / "rows.jsonl"), lines_of(tmp_path / "rows.parquet"), Rows(rows)):
        assert [*found] == rows and found[-1] == rows[-1]
        assert PromptLoader(found, 1).state_dict() == PromptLoader(rows, 1).state_dict()


def test_a_wrong_line_is_named_before_any_row_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\n{"a": 2}\r{"a": oops}\n{"a": 3}\n')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rows\.jsonl:4 must be one JSON object per line: Expecting value"):
            lines_of(path)


def test_a_file_that_changes_stays_for_a_run_what_it_read_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    before, rows = path.stat().st_mtime_ns, lines_of(path)
    path.write_text('{"a": 1}\n{"a": 3}\n')
    os.utime(path, ns=(before, before))
    changed = lines_of(path)
    assert [*rows] == [{"a": 1}, {"a": 2}] and [*changed] == [{"a": 1}, {"a": 3}]
    assert changed.content != rows.content
    os.truncate(path, 9)
    assert rows[1] == {"a": 2}


def test_content_names_rows_and_their_choice() -> None:
    rows = [{"a": 1}, {"a": 2}, {"a": 3}]
    view = Rows(rows)
    others = [view[:2], view[1:], view[::2], view[::-1], Rows([{"a": 1}, {"a": 2}, {"a": 4}])]
    assert len({one.content for one in [view, *others]}) == 6
    assert view.content == Rows([dict(row) for row in rows]).content


def test_content_tells_values_apart_that_are_the_same_json() -> None:
    values = [[1], (1,), None, float("nan"), float("inf"), {1: 2}, {"1": 2}]
    assert len({Rows([{"a": value}]).content for value in values}) == len(values)


@pytest.mark.parametrize("name", ["train.parquet", "data.py:rows"])
def test_pickles_of_others_are_never_read(tmp_path: Path, name: str) -> None:
    class Marks:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "run").touch, ()

    pickle_ = Rows([{"a": 1}]).table.to_dict()
    (column,) = pickle_
    datasets.Dataset.from_dict({column: [pickle.dumps(Marks())]}).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "data.py").write_text(
        "import datasets\ndef rows(split, *, seed):\n"
        f"    return datasets.Dataset.from_parquet({str(tmp_path / 'train.parquet')!r})\n"
    )
    with pytest.raises(ValueError, match=f"must have no column {column}: got one"):
        lines_of(tmp_path / name)
    assert not (tmp_path / "run").exists()


def test_rows_that_can_not_be_stored_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must be plain data, or what pickle takes: got .*lambda.*Convert"):
        Rows([{"a": lambda: 1}])

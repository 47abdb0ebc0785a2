"""Rows that stay in their file are exactly what the file says, wherever and in whatever order they are asked for."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.dataset.loader import PromptLoader
from arealite.dataset.rows import CHUNK, ArrowRows, Chain, JsonLines, ListRows, Rows

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OBJECTS = st.dictionaries(TEXTS, st.none() | TEXTS | st.integers() | st.dictionaries(TEXTS, TEXTS), max_size=3)
BREAKS = st.sampled_from(["\n", "\r\n", "\r", "\n\n", "\n \r\n", "\n\u3000\n"])


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
    found = Rows(JsonLines(path))
    assert len(found) == len(expected) and [*found] == expected
    start, stop = (data.draw(st.integers(-15, 15)) for _ in range(2))
    step = data.draw(st.sampled_from([1, 2, -1]))
    part = found[start:stop:step]
    assert [*part] == expected[start:stop:step] == [part[index] for index in range(len(part))]


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_a_chain_is_the_sum_of_its_parts(lengths: list[int], data: Any) -> None:
    lists = [[{"at": (part, index)} for index in range(length)] for part, length in enumerate(lengths)]
    chain, whole = Rows(Chain([Rows(ListRows(one)) for one in lists])), [row for one in lists for row in one]
    start, stop = (data.draw(st.integers(0, len(whole))) for _ in range(2))
    assert [*chain[start:stop]] == whole[start:stop]
    with pytest.raises(IndexError):
        chain[len(whole)]


def test_more_rows_than_are_read_at_a_time(tmp_path: Path) -> None:
    rows = [{"n": n, "nested": [{"only": n}] if n % 2 else []} for n in range(2 * CHUNK + 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    stored = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"))
    for found in (JsonLines(tmp_path / "rows.jsonl"), ArrowRows(stored), ListRows(rows)):
        assert [*Rows(found)] == rows and Rows(found)[-1] == rows[-1]
        assert PromptLoader(Rows(found), 1).state_dict() == PromptLoader(rows, 1).state_dict()


def test_a_wrong_line_is_named_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\n{"a": 2}\r{"a": oops}\n{"a": 3}\n')
    rows = JsonLines(path)
    assert rows.read(3, 4) == [{"a": 3}]
    with pytest.raises(ValueError, match=r"rows\.jsonl:4 must be one JSON object per line: Expecting value"):
        rows.read(1, 4)


@pytest.mark.parametrize("change", ["rewritten", "cut"])
def test_a_file_that_changes_during_the_run_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = Rows(JsonLines(path))
    if change == "cut":
        before = path.stat().st_mtime_ns
        os.truncate(path, 9)
        os.utime(path, ns=(before, before))
    else:
        path.write_text('{"a": 1}\n{"a": 3}\n')
        os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match=r"rows\.jsonl must stay as it was when it was read first: got a change since"):
        rows[1]


def test_a_file_that_is_replaced_stays_the_one_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    rows = JsonLines(path)
    (tmp_path / "new").write_text('{"a": 2}\n')
    (tmp_path / "new").replace(path)
    assert rows.read(0, 1) == [{"a": 1}] and JsonLines(path).content != rows.content


def test_content_names_rows_and_their_choice(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": 2}, {"a": 3}]
    view = Rows(ListRows(rows))
    others = [view[:2], view[1:], view[::2], view[::-1], Rows(ListRows([{"a": 1}, {"a": 2}, {"a": 4}]))]
    assert len({one.content for one in [view, *others]}) == 6
    assert view.content == Rows(ListRows([dict(row) for row in rows])).content
    assert Rows(ListRows([{"a": object()}])).content is None, "such a row may change unseen"


def test_content_tells_values_apart_that_are_the_same_json() -> None:
    values = [[1], (1,), None, float("nan"), float("inf"), {1: 2}, {"1": 2}]
    contents = {Rows(ListRows([{"a": value}])).content for value in values}
    assert len(contents) == len(values) and None not in contents

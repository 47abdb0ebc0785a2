"""Files appear whole, cut lines are no rows, and failed writes name the file, the cause and the free space."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from testing_disks import full_disk

from arealite.api.cli_args import StatsLoggerConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.files import FileError, publish_folder, read_jsonl, write_atomically, writing


def test_a_file_appears_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    (tmp_path / ".secret.unfinished").write_text("what a crash left")
    write_atomically(path, "old", mode=0o600)
    reader = path.open()
    write_atomically(path, b"new", mode=0o600)
    assert (reader.read(), path.read_text()) == ("old", "new"), "a reader sees one of the two, never a mix"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="must be writable: got FileNotFoundError"):
        write_atomically(tmp_path / "missing" / "file", "text")


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / "partial").mkdir()
        (tmp_path / "partial" / name).touch()
        publish_folder(tmp_path / "partial", tmp_path / "final")
    assert [path.name for path in tmp_path.rglob("*")] == ["final", "second"]


def test_rows_are_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_jsonl(path) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"step')
    assert read_jsonl(path) == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"{\n", "JSONDecodeError"),
        (b"\xff\n", "UnicodeDecodeError"),
        pytest.param(b"[" * 100_000 + b"\n", "RecursionError", id="nested"),
        (b"[1]\n", "TypeError: a list in place of an object"),
    ],
)
def test_rows_that_are_none_name_their_file(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"{re.escape(str(path))} must be as its writer left it: got {cause}"):
        read_jsonl(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "rows.jsonl")
    with pytest.raises(FileError, match=r"rows\.jsonl must be a file: got something else\."):
        read_jsonl(tmp_path / "rows.jsonl")


def test_a_failed_write_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "rows.jsonl"
    with pytest.raises(OSError) as caught, writing(path):
        path.write_text("x")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    text = str(caught.value)
    assert text.startswith(f"{path} must be writable: got FileNotFoundError: [Errno 2] ")
    assert f" free in {tmp_path}. Make room there" in text


def test_rows_of_metrics_that_can_not_be_written_end_the_run(tmp_path: Path) -> None:
    config = StatsLoggerConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path))
    stats = StatsLogger(config, FinetuneSpec(1, 8, 8))
    with full_disk(20_000), pytest.raises(OSError) as caught:
        for step in range(100):
            stats.add({f"metric/number_{index}": 0.5 for index in range(100)})
            stats.commit(step)
    rows = tmp_path / "e" / "t" / "metrics.jsonl"
    assert f"{rows} must be writable: got OSError: [Errno 27] File too large, with " in str(caught.value)

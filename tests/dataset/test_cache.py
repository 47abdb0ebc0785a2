"""Rows are prepared once by one process, whole or not at all, and again when anything that makes them changes."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from testing_quickstart import make_tiny_model

from arealite.chat.template import demonstration
from arealite.dataset import cache, get_custom_dataset
from arealite.dataset.cache import made_once
from arealite.dataset.loader import PromptLoader
from arealite.utils.files import file_lock
from arealite.utils.hf import load_hf_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), ["What is 1+1? #### 2"], layers=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arealite"


def write(path: Path, *, answer: str = "2", rows: int = 5) -> str:
    lines = [json.dumps({"question": f"{n}+1?", "answer": answer if n == rows - 1 else f"{n}"}) for n in range(rows)]
    path.write_text("\n".join(lines))
    return str(path)


def made(folder: Path) -> int:
    return sum(path.is_dir() for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["sft", "rl", "dpo"])
def test_rows_are_made_again_only_when_something_changes(
    tmp_path: Path, folder: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, path = load_hf_tokenizer(model), tmp_path / "rows.jsonl"
    columns: dict[str, Any] = {"chosen_key": "question", "rejected_key": "answer"} if kind == "dpo" else {}

    def load(**keys: Any) -> Any:
        return get_custom_dataset(str(path), type=kind, tokenizer=tokenizer, **{**columns, **keys})

    write(path)
    first, again = load(), load()
    rows = [*first]
    assert rows == [*again] and made(folder) == 1
    assert first.checksum == again.checksum == PromptLoader(rows, 1).state_dict()["dataset_checksum"]
    changed = write(path, answer="3") and load()
    assert [*changed][:4] == rows[:4] and changed[4] != rows[4] and changed.checksum != first.checksum
    for number, keys in enumerate([{"max_length": 1000}, {"max_rows": 3}, {"split": "train[1:]"}], start=3):
        load(**keys)
        assert made(folder) == number
    monkeypatch.setattr(tokenizer, "chat_template", "{# of a chat #}" + tokenizer.chat_template)
    load()
    tokenizer.add_tokens(["+1"])
    load()
    assert made(folder) == 7


def test_a_limit_keeps_the_same_rows_the_second_time(
    tmp_path: Path, folder: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, tokenizer = write(tmp_path / "rows.jsonl", rows=12), load_hf_tokenizer(model)
    for kind, limit in (("sft", 9), ("rl", 7)):
        caplog.clear()
        cold, warm = (
            get_custom_dataset(path, type=kind, tokenizer=tokenizer, max_length=limit)  # type: ignore[arg-type]
            for _ in range(2)
        )
        assert [*cold] == [*warm] and 0 < len(cold) < 12 and cold.checksum == warm.checksum
        assert len(caplog.messages) == 2 and "dropped 2 of 12 rows longer than max_length" in caplog.messages[1]


def test_rows_that_can_not_be_told_apart_are_made_by_everybody(tmp_path: Path, folder: Path, model: Path) -> None:
    (tmp_path / "data.py").write_text(
        "def rows(split, *, seed):\n    return [{'question': '?', 'answer': '!', 'image': object()}]\n"
    )
    for _ in range(2):
        rows = get_custom_dataset(f"{tmp_path}/data.py:rows", type="sft", tokenizer=load_hf_tokenizer(model))
        assert sum(rows[0]["loss_mask"]) == 2 and made(folder) == 0


PROGRAM = """
import sys, time
from pathlib import Path
from arealite.dataset.cache import made_once

def make(folder):
    (folder / "rows").write_text("half")
    print("making", flush=True)
    sys.stdin.readline()
    (folder / "rows").write_text("whole")

print(made_once("key", make, lambda folder: (folder / "rows").read_text()), flush=True)
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    env = os.environ | {"HF_DATASETS_CACHE": str(folder.parent)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def read(folder: Path) -> str:
    return (folder / "rows").read_text()


def test_one_process_makes_what_the_others_wait_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, looks = start(folder), []
    assert process.stdout is not None and process.stdout.readline() == "making\n"

    @contextlib.contextmanager
    def looking(path: Path, *, timeout_s: float) -> Iterator[None]:
        """Let the maker get on once the other has seen that it must wait."""
        try:
            with file_lock(path, timeout_s=timeout_s):
                yield
        except TimeoutError:
            looks.append(path)
            if len(looks) == 1:
                process.stdin.write("go\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            raise

    monkeypatch.setattr(cache, "file_lock", looking)
    monkeypatch.setattr(cache, "_LOOK_S", 0.1)
    assert made_once("key", pytest.fail, read) == "whole" and looks
    assert process.communicate(timeout=120)[0] == "whole\n"


def test_what_a_killed_process_left_is_not_used(folder: Path) -> None:
    process = start(folder)
    assert process.stdout is not None and process.stdout.readline() == "making\n"
    process.kill()
    process.communicate(timeout=60)
    assert (folder / "key.unfinished" / "rows").read_text() == "half"

    def fill(one: Path) -> None:
        (one / "rows").write_text("new")

    assert made_once("key", fill, read) == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["key", "key.lock"]


def test_a_failure_leaves_nothing_and_is_not_remembered(folder: Path) -> None:
    def fail(one: Path) -> None:
        (one / "rows").write_text("half")
        raise ValueError("a wrong row")

    with pytest.raises(ValueError, match="a wrong row"):
        made_once("key", fail, read)
    assert [path.name for path in folder.iterdir()] == ["key.lock"]


def test_a_process_that_gets_no_further_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PATIENCE_S", 0.1)
    monkeypatch.setattr(cache, "_LOOK_S", 0.06)
    folder.mkdir(parents=True)
    with (
        file_lock(folder / "key.lock", timeout_s=1),
        pytest.raises(TimeoutError, match=rf"prepared without a pause of 0\.1 s: got process {os.getpid()} on "),
    ):
        made_once("key", pytest.fail, read)


def test_a_cache_that_can_not_be_written_is_named(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.raises(OSError, match=r"cache/arealite must be a folder that can be written .* Set HF_DATASETS_CACHE"):
        made_once("key", pytest.fail, read)


def test_progress_is_logged_where_nobody_sees_a_bar(
    tmp_path: Path, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_LOG_PERIOD_S", 0.0)
    monkeypatch.setattr(cache, "CHUNK", 4)
    caplog.set_level("INFO")
    path = write(tmp_path / "rows.jsonl")
    get_custom_dataset(path, type="rl", tokenizer=load_hf_tokenizer(model))
    assert caplog.messages == [f"preparing {path}: {count} of 5 rows" for count in (4, 5)]


def test_a_conversation_anywhere_makes_all_rows_conversations(tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    """Whatever is read at a time."""
    tokenizer, path = load_hf_tokenizer(model), tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    monkeypatch.setattr(cache, "CHUNK", 2)
    path.write_text("\n".join([json.dumps({"question": "?", "answer": "!"})] * 4 + [json.dumps({"messages": chat})]))
    rows = get_custom_dataset(str(path), type="sft", tokenizer=tokenizer)
    whole = [demonstration(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])] * 4
    assert [*rows] == [*whole, demonstration(tokenizer, chat)]

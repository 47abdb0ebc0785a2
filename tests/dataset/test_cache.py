"""Rows are prepared once by one process, whole or not at all, and again when anything that makes them changes."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest

from arealite.chat.demonstration import demonstrations
from arealite.dataset import get_custom_dataset, prepare
from arealite.dataset.loader import PromptLoader
from arealite.utils.hf import load_hf_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arealite"


def write(path: Path, *, answer: str = "2", rows: int = 5) -> str:
    lines = [json.dumps({"question": f"{n}+1?", "answer": answer if n == rows - 1 else f"{n}"}) for n in range(rows)]
    path.write_text("\n".join(lines))
    return str(path)


def made(folder: Path) -> int:
    """Return the number of tables that were made of rows; those of the files of rows do not count."""
    infos = [json.loads(path.read_text()) for path in folder.glob("generator/*/*/dataset_info.json")]
    return sum("digest" in info["features"] for info in infos)


@pytest.mark.parametrize("kind", ["sft", "rl", "dpo"])
def test_rows_are_made_again_only_when_something_changes(
    tmp_path: Path, folder: Path, tiny: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, path = load_hf_tokenizer(tiny), tmp_path / "rows.jsonl"
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
    tmp_path: Path, folder: Path, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, tokenizer = write(tmp_path / "rows.jsonl", rows=12), load_hf_tokenizer(tiny)
    for kind, limit in (("sft", 9), ("rl", 7)):
        caplog.clear()
        cold, warm = (
            get_custom_dataset(path, type=kind, tokenizer=tokenizer, max_length=limit)  # type: ignore[arg-type]
            for _ in range(2)
        )
        assert [*cold] == [*warm] and 0 < len(cold) < 12 and cold.checksum == warm.checksum
        assert len(caplog.messages) == 2 and "dropped 2 of 12 rows longer than max_length" in caplog.messages[1]


def test_one_of_those_that_share_the_cache_makes_what_the_others_wait_for(
    tmp_path: Path, folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, entries, calls = write(tmp_path / "rows.jsonl"), prepare._Preparation.entries, []

    def counted(self: Any) -> Any:
        calls.append(self)
        time.sleep(0.2)  # so that the others come meanwhile; the result does not depend on it
        return entries(self)

    monkeypatch.setattr(prepare._Preparation, "entries", counted)
    with ThreadPoolExecutor(3) as threads:
        tokenizers = [load_hf_tokenizer(tiny) for _ in range(3)]
        loaded = [*threads.map(lambda one: get_custom_dataset(path, type="sft", tokenizer=one), tokenizers)]
    assert len(calls) == 1 and {rows.checksum for rows in loaded} == {loaded[0].checksum}


def test_a_failure_is_not_remembered(tmp_path: Path, folder: Path, tiny: Path) -> None:
    path, tokenizer = write(tmp_path / "rows.jsonl"), load_hf_tokenizer(tiny)
    with pytest.raises(ValueError, match="max_length must leave some rows: got 1"):
        get_custom_dataset(path, type="sft", tokenizer=tokenizer, max_length=1)
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match="must have the column answer: got question in row 0"):
        get_custom_dataset(path, type="sft", tokenizer=tokenizer)
    assert made(folder) == 0


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, folder: Path, tiny: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.raises(OSError, match=r"cache/arealite must be a folder that can be written .* Set HF_DATASETS_CACHE"):
        get_custom_dataset(write(tmp_path / "rows.jsonl"), type="sft", tokenizer=load_hf_tokenizer(tiny))


def test_a_row_is_made_as_if_it_were_alone(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read at a time."""
    tokenizer, path = load_hf_tokenizer(tiny), tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    monkeypatch.setattr(prepare, "CHUNK", 2)

    def load(*rows: Any) -> Any:
        path.write_text("\n".join(map(json.dumps, rows)))
        return [*get_custom_dataset(str(path), type="sft", tokenizer=tokenizer)]

    asked, told = {"question": "?", "answer": "!"}, {"messages": chat}
    (alone,) = load(asked)
    assert sum(alone["loss_mask"]) == 2 and alone["input_ids"][-1] == tokenizer.eos_token_id
    (whole,) = demonstrations(tokenizer, chat)
    assert load(asked, told, told, told, asked) == [alone, whole, whole, whole, alone]

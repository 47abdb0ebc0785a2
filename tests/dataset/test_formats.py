"""Data as other tools write it: their columns, their messages, their files."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from testing_agents import LOOK_UP
from testing_chat_templates import real_tokenizer

from arealite.dataset import get_custom_dataset

ASK, TOLD = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASK],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "answer": "1+1=2 #### 2"},
}
OPENAI = {"messages": [{"role": "system", "content": "Add."}, ASK, {**TOLD, "weight": 0}, ASK, {**TOLD, "weight": 1}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}


def load(folder: Path, row: dict[str, Any], **options: Any) -> list[Any]:
    (path := folder / "rows.jsonl").write_text(json.dumps(row))
    return list(get_custom_dataset(str(path), **options))


@pytest.mark.parametrize(
    ("answer_key", "answer"),
    [("reward_model.ground_truth", "2"), ("extra_info.answer", "1+1=2 #### 2"), ("reward_model", VERL["reward_model"])],
)
def test_rows_of_verl(tmp_path: Path, answer_key: str, answer: object) -> None:
    (row,) = load(tmp_path, VERL, type="rl", answer_key=answer_key)
    assert row == {**VERL, "messages": [ASK], "answer": answer}


def test_a_nested_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have the column reward_model\.truth: got data_source, prompt, ability"):
        load(tmp_path, VERL, type="rl", answer_key="reward_model.truth")


FORMS = {
    "TRL, prompt and completion as messages": {"prompt": [ASK], "completion": [TOLD]},
    "TRL, prompt and completion as texts": {"prompt": "1+1?", "completion": "2"},
    "TRL, messages": {"messages": [ASK, TOLD]},
    "ShareGPT": SHAREGPT,
    "question and answer": {"question": "1+1?", "answer": "2"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_demonstration_gives_the_same_tokens(tmp_path: Path, tokenizer: Any, form: str) -> None:
    (row,) = load(tmp_path, FORMS[form], type="sft", tokenizer=tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "<|user|>1+1?<|end|><|assistant|>2<|end|>"
    assert row["loss_mask"] == [0] * (len(row["loss_mask"]) - 2) + [1, 1]


def test_a_turn_of_weight_0_is_not_taught(tmp_path: Path, tokenizer: Any) -> None:
    (row,) = load(tmp_path, OPENAI, type="sft", tokenizer=tokenizer)
    assert sum(row["loss_mask"]) == 2 and row["loss_mask"][-2:] == [1, 1]


@pytest.mark.parametrize("is_text", [False, True])
def test_the_tools_of_a_demonstration_are_in_its_prompt(tmp_path: Path, is_text: bool) -> None:
    tokenizer, tools = real_tokenizer("Qwen2.5"), [LOOK_UP]
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "cat"}'}}
    chat = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = {"messages": chat, "tools": json.dumps(tools) if is_text else tools}
    (made,) = load(tmp_path, row, type="sft", tokenizer=tokenizer)
    ids, mask = made["input_ids"], made["loss_mask"]
    assert "look_up" in tokenizer.decode(ids[: mask.index(1)])
    taught = tokenizer.decode([one for one, is_taught in zip(ids, mask, strict=True) if is_taught])
    assert taught == '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_what_a_template_refuses_is_named_with_file_row_and_message(tmp_path: Path, kind: str) -> None:
    tokenizer, fine = real_tokenizer("Gemma 3"), [ASK, TOLD] if kind == "sft" else [ASK]
    rows = [{"messages": fine}, {"messages": [TOLD, *fine]}]
    (path := tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError, match=r"^row 1 of .*chats\.jsonl: the chat template .* \(message 1 of \d\)\. Change"
    ):
        get_custom_dataset(str(path), type=kind, tokenizer=tokenizer, max_length=100, answer_key=None)


def test_a_conversation_that_becomes_several_rows_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = real_tokenizer("Qwen3")
    chat = {"messages": [ASK, {**TOLD, "reasoning_content": "one"}, ASK, {**TOLD, "reasoning_content": "two"}]}
    rows = load(tmp_path, chat, type="sft", tokenizer=tokenizer)
    taught = [[one for one, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask] for row in rows]
    assert [tokenizer.decode(ids) for ids in taught] == [
        f"<think>\n{thought}\n</think>\n\n2<|im_end|>" for thought in ("two", "one")
    ]
    (told,) = [record.getMessage() for record in caplog.records if "became" in record.getMessage()]
    assert told.startswith(f"1 conversations of {tmp_path / 'rows.jsonl'} became 2 rows: the chat template rewrites")


def test_a_pair_is_about_its_last_turn_where_earlier_ones_are_rewritten(tmp_path: Path) -> None:
    tokenizer = real_tokenizer("Qwen3")
    history, wrong = [ASK, {**TOLD, "reasoning_content": "one"}, ASK], {"role": "assistant", "content": "3"}
    ((chosen, rejected),) = (
        row["pair"]
        for row in load(
            tmp_path, {"chosen": [*history, TOLD], "rejected": [*history, wrong]}, type="dpo", tokenizer=tokenizer
        )
    )
    for answer, text in ((chosen, "2"), (rejected, "3")):
        taught = [one for one, mask in zip(answer["input_ids"], answer["loss_mask"], strict=True) if mask]
        assert tokenizer.decode(taught) == f"{text}<|im_end|>"
    other = {"chosen": [ASK, TOLD, ASK, TOLD], "rejected": [ASK, wrong, ASK, TOLD]}
    with pytest.raises(ValueError, match="must keep the turns of an answer as they are: got one that rewrites some"):
        load(tmp_path, other, type="dpo", tokenizer=tokenizer)


QUESTIONS = [{"question": f"{n}+½?", "answer": str(n)} for n in range(3)]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in QUESTIONS)
FILES = {
    "gz.jsonl.gz": gzip.compress(LINES.encode()),
    "zst.jsonl.zst": pyarrow.compress(LINES.encode(), "zstd", asbytes=True),
    "whole.json.gz": gzip.compress(json.dumps(QUESTIONS).encode()),
    "bom.jsonl": LINES.encode("utf-8-sig"),
    "bom.json": json.dumps(QUESTIONS).encode("utf-8-sig"),
    "wide.jsonl": LINES.encode("utf-16"),
    "bom.csv": "question,answer\n0+½?,0\n1+½?,1\n2+½?,2\n".encode("utf-8-sig"),
    "wide.csv": "question,answer\n0+½?,0\n1+½?,1\n2+½?,2\n".encode("utf-16"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_compressed_or_in_another_encoding(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    rows = get_custom_dataset(str(tmp_path / name), type="rl")
    assert [(row["question"], row["answer"]) for row in rows] == [(one["question"], one["answer"]) for one in QUESTIONS]


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(QUESTIONS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(tmp_path / "splits")
    assert len(get_custom_dataset(str(tmp_path / "one"), type="rl")) == 3
    assert len(get_custom_dataset(str(tmp_path / "splits"), type="rl")) == 3
    assert get_custom_dataset(str(tmp_path / "splits"), type="rl", split="test")[0]["answer"] == "2"
    with pytest.raises(ValueError, match="must have the split test: got train"):
        get_custom_dataset(str(tmp_path / "one"), type="rl", split="test")

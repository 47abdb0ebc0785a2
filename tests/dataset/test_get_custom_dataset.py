import json
import re

import datasets
import pytest
import torch
from testing_quickstart import WORD_PROBLEMS

from arealite.dataset import get_custom_dataset

torch.set_num_threads(1)
ROWS = [{"question": f"What is {n}+1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}", "level": n} for n in range(10)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "any name.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return path


def test_prompts_keep_all_columns_and_are_read_whole_on_every_rank(jsonl) -> None:
    rows = get_custom_dataset(str(jsonl), rank=1, world_size=2, type="rl")
    assert len(rows) == 10
    assert rows[3] == {**ROWS[3], "messages": [{"role": "user", "content": "What is 3+1?"}]}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_files_and_folders_of_every_format(tmp_path, suffix) -> None:
    for split in ("train", "test"):
        file = tmp_path / f"main_{split}{suffix}"
        rows = ROWS if split == "train" else ROWS[:3]
        if suffix == ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(file)
        elif suffix == ".json":
            file.write_text(json.dumps(rows))
        else:
            file.write_text("\n".join(map(json.dumps, rows)))
    assert get_custom_dataset(str(tmp_path / f"main_test{suffix}"), type="rl", split="train")[2]["level"] == 2
    assert len(get_custom_dataset(str(tmp_path), type="rl", split="train")) == 10
    assert len(get_custom_dataset(str(tmp_path), type="rl", split="test")) == 3
    with pytest.raises(ValueError, match="'valid' in its name"):
        get_custom_dataset(str(tmp_path), type="rl", split="valid")


def test_a_part_of_a_file(jsonl) -> None:
    rows = get_custom_dataset(str(jsonl), type="rl", split="train[50%:]", max_rows=3)
    assert [row["level"] for row in rows] == [5, 6, 7]


def test_columns_have_the_names_of_the_source(tmp_path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "solution": 2, "answer": "two", "tests": [{"in": 1}]}))

    def row(**columns):
        return get_custom_dataset(str(path), type="rl", prompt_key="prompt", **columns)[0]

    own = {"prompt": "1+1?", "solution": 2, "tests": [{"in": 1}]}
    ask = [{"role": "user", "content": "1+1?"}]
    assert row(answer_key="solution") == {**own, "answer": "2", "messages": ask}
    assert row(answer_key="tests") == {**own, "answer": [{"in": 1}], "messages": ask}
    assert row(answer_key=None) == {**own, "answer": "two", "messages": ask}
    asked = row(system_prompt="Be brief.", prompt_suffix=" Think.")["messages"]
    assert asked == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1? Think."}]


def test_conversations_are_kept(tmp_path) -> None:
    path = tmp_path / "chats.jsonl"
    system, ask, reply = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
    path.write_text(json.dumps({"messages": [system, ask, reply, ask], "question": "?", "answer": "1"}))
    (row,) = get_custom_dataset(str(path), type="rl")
    assert row["messages"] == [system, ask, reply, ask]
    (row,) = get_custom_dataset(str(path), type="rl", system_prompt="Be brief.", prompt_suffix="!")
    assert row["messages"] == [system, ask, reply, {"role": "user", "content": "u!"}]
    (row,) = get_custom_dataset(str(path), type="rl", prompt_key="question")
    assert row["messages"] == [{"role": "user", "content": "?"}]
    for wrong, told in (
        ([system, ask, reply], "prompt must end before the model's turn: got messages that ends with an assistant"),
        ([{"from": "human", "text": "?"}], "messages must be a text or a list of messages with role and content"),
        ([], "messages must be a text or a list"),
    ):
        path.write_text(json.dumps({"messages": wrong, "answer": "1"}))
        with pytest.raises(ValueError, match=f"{told}.* row 0 of .*chats.jsonl. Set train_dataset.prompt_key"):
            get_custom_dataset(str(path), type="rl")


def test_demonstrations_from_conversations_teach_every_turn_of_the_assistant(tmp_path, tokenizer) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [
        {
            "messages": [
                {"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, ["1+1?", "2", "2+2?", "4"])
            ]
        },
        {"messages": [{"role": "user", "content": "3+3?"}], "answer": "6"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, short = get_custom_dataset(str(path), type="sft", tokenizer=tokenizer)
    assert tokenizer.decode(whole["input_ids"]) == (
        "<|user|>1+1?<|end|><|assistant|>2<|end|><|user|>2+2?<|end|><|assistant|>4<|end|>"
    )
    for row, taught in ((whole, "2<|end|>4<|end|>"), (short, "6<|end|>")):
        trained = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
        assert tokenizer.decode(trained) == taught


def test_demonstrations_are_prompt_answer_and_eos(jsonl, tokenizer) -> None:
    row = get_custom_dataset(str(jsonl), type="sft", tokenizer=tokenizer)[3]
    assert tokenizer.decode(row["input_ids"]) == "<|user|>What is 3+1?<|end|><|assistant|>3+1=4\n#### 4<|end|>"
    answer = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(answer) == "3+1=4\n#### 4<|end|>"
    assert row["loss_mask"] == [0] * (len(row["loss_mask"]) - len(answer)) + [1] * len(answer)


def test_shards_of_demonstrations_are_equal_and_disjoint(jsonl, tokenizer) -> None:
    whole = [row["input_ids"] for row in get_custom_dataset(str(jsonl), type="sft", tokenizer=tokenizer)]
    shards = [
        [row["input_ids"] for row in get_custom_dataset(str(jsonl), rank, 3, type="sft", tokenizer=tokenizer)]
        for rank in range(3)
    ]
    assert [len(shard) for shard in shards] == [3, 3, 3]
    assert sorted(row for shard in shards for row in shard) == sorted(whole[:9])


def test_longer_rows_are_dropped_counted_and_logged(jsonl, tokenizer, caplog) -> None:
    rows = get_custom_dataset(str(jsonl), type="sft", tokenizer=tokenizer)
    lengths = sorted({len(row["input_ids"]) for row in rows})
    assert len(lengths) == 2  # 9+1=10 is longer
    kept = get_custom_dataset(str(jsonl), type="sft", tokenizer=tokenizer, max_length=lengths[0])
    assert len(kept) == 9 and "dropped 1 of 10 rows longer than max_length" in caplog.text
    prompts = get_custom_dataset(str(jsonl), type="rl", tokenizer=tokenizer, max_length=lengths[0])
    assert len(prompts) == 10  # all questions are equally long
    with pytest.raises(ValueError, match="max_length must leave some rows: got 3"):
        get_custom_dataset(str(jsonl), type="rl", tokenizer=tokenizer, max_length=3)


def test_a_function_of_a_python_file(tokenizer) -> None:
    path = f"{WORD_PROBLEMS}?train=30&test=20"
    rows = get_custom_dataset(f"{path}&steps=2", type="rl", split="train", seed=4)
    assert len(rows) == 30 and rows[0]["messages"][0]["content"] == rows[0]["question"]
    assert len(get_custom_dataset(path, type="sft", split="test", tokenizer=tokenizer)) == 20
    other = get_custom_dataset(f"{path}&steps=2", type="rl", split="train", seed=5)
    assert [*rows] == [*rows[:10], *rows[10:]] and [*rows] != [*other]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("{file}:rows?sise=3", "must take .* got an unexpected keyword argument 'sise'"),
        ("{file}:none", "must have a function none"),
        ("{file}:number", "must have a function number"),
        ("{file}:empty", "must have rows: got none"),
        ("{file}:nothing", "nothing must return a list of rows, or a Dataset: got NoneType"),
        ("{file}:generated", "generated must return a list of rows, or a Dataset: got generator"),
        ("{file}:rows?size=2", "the column question: got text in row 0 .*Set train_dataset.prompt_key to"),
        ("no_file.py:rows", "dataset file must exist: got 'no_file.py'"),
    ],
)
def test_functions_that_are_no_data_sets(tmp_path, path, told) -> None:
    file = tmp_path / "data.py"
    file.write_text(
        "number = 3\n"
        "def rows(split, *, seed, size='1'):\n    return [{'text': split}] * int(size)\n"
        "def empty(split, *, seed):\n    return []\n"
        "def nothing(split, *, seed):\n    pass\n"
        "def generated(split, *, seed):\n    yield from rows(split, seed=seed)\n"
    )
    with pytest.raises(ValueError, match=told):
        get_custom_dataset(path.format(file=file), type="rl")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the hub, read by the real library."""
    folder, load = tmp_path / "hub", datasets.load_dataset
    for name in ("org/name/main/train", "org/name/main/test", "openai/gsm8k/main/test", "org/no_test/default/train"):
        (folder / name).mkdir(parents=True)
        rows = ROWS if name.endswith("train") else ROWS[:2]
        datasets.Dataset.from_list(rows).to_parquet(folder / name / "rows.parquet")
    for name in ("org/name/main", "openai/gsm8k/main", "org/no_test/default"):
        config = {"config_name": name.rpartition("/")[2], "data_dir": name.rpartition("/")[2]}
        (folder / name).parent.joinpath("README.md").write_text(f"---\nconfigs: {json.dumps([config])}\n---\n")

    def from_folder(path, *args, **kwargs):
        if not (folder / path).exists():
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub.")
        return load(str(folder / path), *args, cache_dir=str(tmp_path / "cache"), **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", from_folder)


def test_any_data_set_of_the_hub_and_parts_of_its_splits(hub) -> None:
    def numbers(path: str, split: str, **columns) -> list[int]:
        return [row["level"] for row in get_custom_dataset(path, type="rl", split=split, **columns)]

    assert numbers("org/name", "train[:80%]", config_name="main") == list(range(8))
    assert numbers("org/name", "train[8:]+test") == [8, 9, 0, 1]
    assert numbers("gsm8k", "test") == numbers("openai/gsm8k", "test") == [0, 1]
    assert numbers("hf-dataset://org/name/main/train/rows.parquet", "train[-1:]") == [9]
    with pytest.raises(ValueError, match=r"org/no_test must have the split test: got train\. Set .*dataset\.split"):
        numbers("org/no_test", "test")
    for path in ("org/none", "hf-dataset://org/none/rows.parquet"):
        with pytest.raises(ValueError, match=r"org/none must be on the hub, or .*: got Dataset 'org/none' doesn't"):
            numbers(path, "train")
    with pytest.raises(ValueError, match=r"split must be like train, train\[:95%\] .*: got 'train\[:'"):
        numbers("org/name", "train[:")


def test_values_of_a_csv_are_the_texts_that_stand_there(tmp_path) -> None:
    """Nothing is guessed: 007 is no 7, and a column with a gap no column of floats."""
    (tmp_path / "train.csv").write_bytes(b'\xef\xbb\xbfquestion,answer,note\n"1, or\n""2""?",007,\nhow many?,1.50,NA\n')
    for path in (tmp_path / "train.csv", tmp_path):
        first, second = get_custom_dataset(str(path), type="rl")
        assert first.pop("messages") == [{"role": "user", "content": '1, or\n"2"?'}]
        assert first == {"question": '1, or\n"2"?', "answer": "007", "note": ""}
        assert (second["answer"], second["note"]) == ("1.50", "NA")
    (tmp_path / "long.csv").write_text(f"question,answer\n{'?' * 200_000},\n")
    assert len(get_custom_dataset(str(tmp_path / "long.csv"), type="rl")[0]["question"]) == 200_000


def test_a_missing_file_is_told_as_such() -> None:
    with pytest.raises(ValueError, match=r"dataset file must exist: got 'no/such/file\.jsonl'"):
        get_custom_dataset("no/such/file.jsonl", type="rl")


@pytest.mark.parametrize(
    "path", ["", "no/such/file", "gsm9k", "org/name/", "hf-dataset://org/name", "hf-dataset:///x/y"]
)
def test_paths_that_mean_nothing_say_what_is_accepted(path: str) -> None:
    with pytest.raises(ValueError, match=r"must be 'gsm8k', .* or 'hf-dataset"):
        get_custom_dataset(path, type="rl")


def test_files_that_are_no_questions_say_what_is_missing(tmp_path) -> None:
    bad = {
        "a.jsonl": (
            '{"question": "?"}\n',
            "column answer: got question in row 0 of .*a.jsonl. Set train_dataset.answer_key to",
        ),
        "b.jsonl": ("{oops\n", "b.jsonl:1 must be one JSON object"),
        "c.json": ('{"question": "?"}', "JSON list"),
        "d.jsonl": ("", "must have rows"),
        "e.tsv": ("question\tanswer\n", "must end in .jsonl, .json, .parquet, .csv"),
        "g.csv": ("question,answer\n1,2\n3,4,5\n", "g.csv must be .*: got ArrowInvalid: .* 2 columns, got 3: 3,4,5"),
        "h.csv": ("question,answer\n1\n", "h.csv must be .*: got ArrowInvalid: .* 2 columns, got 1: 1"),
        "i.csv": ("answer,question,answer\n1,2,3\n", 'i.csv must be .*: got KeyError: .*"answer" exists 2 times'),
        "f.jsonl": ("3\n", "got int in row 0"),
    }
    for name, (text, message) in bad.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            get_custom_dataset(str(tmp_path / name), type="rl")


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.jsonl", b"\xff\n", "UnicodeDecodeError"),
        pytest.param("a.jsonl", b"[" * 100_000, "RecursionError", id="nested"),
        ("a.json", b"[", "JSONDecodeError"),
        ("a.parquet", b"PAR1", "ArrowInvalid"),
        ("a.csv", b'question,answer\n"1,2', "ArrowInvalid"),
        ("a.csv", b"question,answer\n\xff,2", "ArrowInvalid"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name: str, content: bytes, cause: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} must be as its writer left it: got {cause}: "):
        get_custom_dataset(str(path), type="rl")


def test_missing_arguments_are_named(jsonl) -> None:
    with pytest.raises(ValueError, match="tokenizer must be given"):
        get_custom_dataset(str(jsonl), type="sft")
    with pytest.raises(ValueError, match=r"must get one source: got mixed_with or weight\. Use load_datasets"):
        get_custom_dataset(str(jsonl), type="rl", weight=1.0)
    with pytest.raises(ValueError, match="one of sft, rl, dpo, rw: got 'ppo'"):
        get_custom_dataset(str(jsonl), type="ppo")  # type: ignore[arg-type]

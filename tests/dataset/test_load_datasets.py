import json

import pytest
from testing_quickstart import WORD_PROBLEMS

from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from arealite.dataset import load_datasets


@pytest.fixture
def load(tmp_path, tokenizer):
    """Load the data sets of a config with overrides, as a script does."""
    (tmp_path / "config.yaml").write_text(
        "{experiment_name: e, trial_name: t, train_dataset: {batch_size: 4}, valid_dataset: {}}"
    )

    def load(*overrides: str, cls=GRPOConfig):
        argv = ["--config", str(tmp_path / "config.yaml"), "tokenizer_path=t", *overrides]
        return load_datasets(load_expr_config(argv, cls)[0], tokenizer)

    return load


def write(path, start: int, end: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "label": n}) + "\n" for n in range(start, end)))


COLUMNS = ("train_dataset.prompt_key=prompt", "train_dataset.answer_key=label")


def numbers(rows) -> list[int]:
    return [row["label"] for row in rows]


def test_a_file_gives_its_last_rows_to_the_evaluation(load, tmp_path, caplog) -> None:
    write(tmp_path / "own.jsonl", 0, 100)
    path = f"train_dataset.path={tmp_path / 'own.jsonl'}"
    train, valid = load(path, *COLUMNS)
    assert (numbers(train), numbers(valid)) == ([*range(95)], [*range(95, 100)])
    told = "own.jsonl has no test split: its last 5 of 100 rows are held out for evaluation, not trained on."
    assert caplog.messages == [f"{tmp_path}/{told}"]
    train, valid = load(path, *COLUMNS, "train_dataset.max_rows=7", "valid_dataset.max_rows=2")
    assert (numbers(train), numbers(valid)) == ([*range(7)], [95, 96])
    train, valid = load(path, *COLUMNS, "valid_dataset=null")
    assert (len(train), valid) == (100, None)


def test_a_large_file_gives_at_most_a_thousand_rows(load, tmp_path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "?", "label": 1}\n' * 20_100)
    train, valid = load(f"train_dataset.path={tmp_path / 'own.jsonl'}", *COLUMNS)
    assert (len(train), len(valid)) == (19_100, 1_000)


def test_a_held_out_row_has_the_number_that_it_has_in_the_file(load, tmp_path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "?", "label": 1}\n' * 9 + '{"prompt": "?", "label": null}\n')
    with pytest.raises(ValueError, match=r"must have the column label: got prompt, label \(null\) in row 9 of "):
        load(f"train_dataset.path={tmp_path / 'own.jsonl'}", *COLUMNS)


def test_a_single_row_can_not_be_shared(load, tmp_path) -> None:
    write(tmp_path / "own.jsonl", 0, 1)
    with pytest.raises(ValueError, match=r"own.jsonl must have a row for training and one to hold out: got one\. Add"):
        load(f"train_dataset.path={tmp_path / 'own.jsonl'}", *COLUMNS)


def test_parts_of_a_file_can_be_named(load, tmp_path, caplog) -> None:
    write(tmp_path / "own.jsonl", 0, 10)
    path = f"train_dataset.path={tmp_path / 'own.jsonl'}"
    train, valid = load(path, *COLUMNS, "train_dataset.split=train[:60%]", "valid_dataset.split=train[60%:]")
    assert (numbers(train), numbers(valid), caplog.records) == ([*range(6)], [*range(6, 10)], [])


def test_a_folder_with_a_test_file_holds_nothing_out(load, tmp_path) -> None:
    folder = tmp_path / "data"
    write(folder / "latest_train.jsonl", 0, 40)
    train, valid = load(f"train_dataset.path={folder}", *COLUMNS)
    assert (numbers(train), numbers(valid)) == ([*range(38)], [38, 39])
    write(folder / "test.jsonl", 50, 53)
    train, valid = load(f"train_dataset.path={folder}", *COLUMNS)
    assert (numbers(train), numbers(valid)) == ([*range(40)], [50, 51, 52])


def test_another_configuration_of_a_data_set_is_one_of_its_own(load, tmp_path) -> None:
    """Rows of the training configuration never stand in for it."""
    folder = tmp_path / "hub"
    folder.mkdir()
    configs = [{"config_name": name, "data_files": f"data/{name}.jsonl"} for name in ("easy", "hard")]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    for name, start in (("easy", 0), ("hard", 50)):
        write(folder / "data" / f"{name}.jsonl", start, start + 40)
    named = f"train_dataset.path={folder}", "train_dataset.config_name=easy"
    assert numbers(load(*named, *COLUMNS)[1]) == [38, 39]
    others = *named, *COLUMNS, "valid_dataset.config_name=hard"
    with pytest.raises(ValueError, match=r"must have the split test: got train\. Set .*valid_dataset\.split"):
        load(*others)
    assert numbers(load(*others, "valid_dataset.split=train[:2]")[1]) == [50, 51]


def test_a_validation_set_of_its_own_is_read_as_it_says(load, tmp_path) -> None:
    write(tmp_path / "own.jsonl", 0, 40)
    write(tmp_path / "valid.jsonl", 50, 53)
    train, valid = load(
        f"train_dataset.path={tmp_path / 'own.jsonl'}", f"valid_dataset.path={tmp_path / 'valid.jsonl'}", *COLUMNS
    )
    assert (len(train), numbers(valid)) == (40, [50, 51, 52])
    write(tmp_path / "data" / "train.jsonl", 50, 53)
    with pytest.raises(ValueError, match="'test' in its name"):
        load(f"train_dataset.path={tmp_path / 'own.jsonl'}", f"valid_dataset.path={tmp_path / 'data'}", *COLUMNS)


def test_a_function_is_asked_for_both_splits(load) -> None:
    train, valid = load(f"train_dataset.path={WORD_PROBLEMS}?train=30&test=4")
    assert (len(train), len(valid)) == (30, 4)


def test_a_base_model_gets_plain_prompts(load, tmp_path, tokenizer, monkeypatch, caplog) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (tmp_path / "own.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}')
    one = (f"train_dataset.path={tmp_path / 'own.jsonl'}", "valid_dataset=null", "train_dataset.prompt_suffix=' A:'")
    (row, _), _ = load(*one, "train_dataset.system_prompt=Add.", cls=SFTConfig)
    assert tokenizer.decode(row["input_ids"]) == "Add.\n\n1+1? A:2<|end|>"
    assert caplog.messages == ["the tokenizer has no chat template: prompts are plain texts, without roles."]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": turns}))
    with pytest.raises(ValueError, match="must have a chat template: got a tokenizer without one"):
        load(*one, cls=SFTConfig)


def test_a_template_that_refuses_the_conversation_is_told_before_the_run(
    load, tmp_path, tokenizer, monkeypatch
) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    write(tmp_path / "own.jsonl", 0, 40)
    with pytest.raises(ValueError, match=r"^row 0 of .*: .* got System role not supported \(message 1 of 2\)\. Change"):
        load(f"train_dataset.path={tmp_path / 'own.jsonl'}", *COLUMNS, "train_dataset.system_prompt=Hi")

"""Pairs of answers, in every form that public data sets have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from arealite.dataset import get_custom_dataset

torch.set_num_threads(1)
ASK = {"role": "user", "content": "1+1?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("1+1=2", "1+1=3"))


def load(tmp_path: Path, tokenizer: Any, *rows: dict[str, Any], **columns: Any) -> list[dict[str, Any]]:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return get_custom_dataset(str(path), type=columns.pop("type", "dpo"), tokenizer=tokenizer, **columns)


def taught(tokenizer: Any, answer: dict[str, list[int]]) -> str:
    return tokenizer.decode([one for one, mask in zip(answer["input_ids"], answer["loss_mask"], strict=True) if mask])


FORMS = {
    "prompt and texts": {"prompt": "1+1?", "chosen": "1+1=2", "rejected": "1+1=3"},
    "messages and texts": {"prompt": [ASK], "chosen": "1+1=2", "rejected": "1+1=3"},
    "messages and turns": {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "conversations beside the prompt": {"prompt": "1+1?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "conversations": {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
}


@pytest.mark.parametrize("type", ["dpo", "rw"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tokens(tmp_path: Path, tokenizer: Any, form: str, type: str) -> None:
    ((chosen, rejected),) = (row["pair"] for row in load(tmp_path, tokenizer, FORMS[form], type=type))
    for one, result in ((chosen, "2"), (rejected, "3")):
        assert tokenizer.decode(one["input_ids"]) == f"<|user|>1+1?<|end|><|assistant|>1+1={result}<|end|>"
        shared = "" if form == "conversations" else "1+1="  # what both begin with counts as the prompt
        assert taught(tokenizer, one) == f"{shared}{result}<|end|>"


def test_whole_texts_are_taught_from_where_they_part(tmp_path: Path, tokenizer: Any) -> None:
    row = {"better": "Human: 1+1? Assistant: 2", "worse": "Human: 1+1? Assistant: 31"}
    ((chosen, rejected),) = (
        row["pair"] for row in load(tmp_path, tokenizer, row, chosen_key="better", rejected_key="worse")
    )
    assert tokenizer.decode(rejected["input_ids"]) == "Human: 1+1? Assistant: 31<|end|>"
    assert (taught(tokenizer, chosen), taught(tokenizer, rejected)) == ("2<|end|>", "31<|end|>")


def test_prompts_of_pairs_follow_the_config(tmp_path: Path, tokenizer: Any) -> None:
    options = {"system_prompt": "Add.", "prompt_suffix": " Now!", "prompt_key": "ask"}
    for form in ("prompt and texts", "messages and turns"):
        row = {("ask" if key == "prompt" else key): value for key, value in FORMS[form].items()}
        ((chosen, _),) = (row["pair"] for row in load(tmp_path, tokenizer, row, **options))
        assert tokenizer.decode(chosen["input_ids"]).startswith("<|system|>Add.<|end|><|user|>1+1? Now!<|end|>")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"prompt": "?", "chosen": "2"},
            "must have the column rejected: got prompt, chosen in row 0 of .*rejected_key",
        ),
        ({"chosen": [ASK], "rejected": [ASK]}, "chosen must end with the assistant's turn: got one that ends with"),
        ({"chosen": [], "rejected": []}, "chosen must be a text or a list of messages"),
        ({"prompt": "?", "chosen": [{"role": "assistant"}], "rejected": "3"}, "chosen must be a text or a list"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path: Path, tokenizer: Any, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load(tmp_path, tokenizer, row)


def test_a_pair_is_as_long_as_its_longer_answer(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "?", "chosen": "1", "rejected": "1" * n} for n in (1, 2, 3)]
    (longest,) = {len(load(tmp_path, tokenizer, rows[1])[0]["pair"][1]["input_ids"])}
    assert len(load(tmp_path, tokenizer, *rows, max_length=longest)) == 2

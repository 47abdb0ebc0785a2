"""Data sets as plain lists of rows: prompts for reinforcement learning, token lists for supervised fine-tuning.

Prompts are read whole by whoever asks, in the order of the source, so that an index names the same prompt for the
whole run. Demonstrations are sharded: every rank gets equally many rows and no row is on two ranks.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, Literal

from arealite.api.cli_args import DatasetConfig
from arealite.dataset.gsm8k import SUFFIXES, read_function, read_hub, read_hub_file, read_path

logger = logging.getLogger(__name__)

ACCEPTED = (
    "'gsm8k', a .jsonl, .json or .parquet file with the columns question and answer, a folder of such files, "
    "'FILE.py:FUNCTION?option=value', or 'hf-dataset://org/name/file/in/the/repository.jsonl'"
)
_HUB_SCHEME = "hf-dataset://"
_FUNCTION = re.compile(r"(.+\.py):(\w+)(?:\?(.*))?")


def get_custom_dataset(
    path: str,
    rank: int = 0,
    world_size: int = 1,
    type: Literal["sft", "rl"] = "sft",
    split: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    max_rows: int | None = None,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Load a data set.

    `rl` rows are `{"messages", "question", "answer", ...}`, never sharded. `sft` rows are this rank's share of
    `{"input_ids", "loss_mask"}`; up to `world_size - 1` rows at the end are left out so that all shares are equal.
    `max_rows` keeps the first so many rows of the source; `max_length` drops longer rows (for `rl`: longer prompts)
    and logs how many. `seed` is for data that a function generates.
    """
    if type not in ("sft", "rl"):
        raise ValueError(f"dataset type must be 'sft' or 'rl': got {type!r}. Set train_dataset.type.")
    if tokenizer is None and (type == "sft" or max_length is not None):
        raise ValueError("tokenizer must be given for type='sft' or max_length: got None. Pass load_hf_tokenizer(...).")
    rows = [_as_prompt(row) for row in _read(path, split or "train", seed)[:max_rows]]
    if type == "rl":
        return rows if max_length is None else _shorter_prompts(rows, tokenizer, max_length)
    demonstrations = _tokenize(rows, tokenizer, max_length)
    share = len(demonstrations) // world_size
    return demonstrations[rank : share * world_size : world_size]


def load_split(config: DatasetConfig, split: str, *, tokenizer: Any, seed: int) -> list[dict[str, Any]]:
    """Load the split that a config block describes, whole."""
    return get_custom_dataset(
        config.path,
        type=config.type,
        split=split,
        tokenizer=tokenizer,
        max_length=config.max_length,
        max_rows=config.max_rows,
        seed=seed,
    )


def _read(path: str, split: str, seed: int) -> list[dict[str, Any]]:
    if path in ("gsm8k", "openai/gsm8k"):
        return read_hub("openai/gsm8k", "main", split)
    if function := _FUNCTION.fullmatch(path):
        return read_function(function[1], function[2], function[3] or "", split, seed)
    if path.startswith(_HUB_SCHEME):
        parts = path.removeprefix(_HUB_SCHEME).split("/", maxsplit=2)
        if len(parts) == 3 and all(parts):
            return read_hub_file("/".join(parts[:2]), parts[2])
    elif path and Path(path).expanduser().exists():
        return read_path(Path(path).expanduser(), split)
    if path.endswith(SUFFIXES) and not path.startswith(_HUB_SCHEME):
        raise ValueError(f"dataset file must exist: got {path!r}, which does not. Correct train_dataset.path.")
    raise ValueError(f"dataset path must be {ACCEPTED}: got {path!r}, which is none of them. Correct it.")


def _as_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "messages": [{"role": "user", "content": row["question"]}]}


def _prompt_tokens(rows: list[dict[str, Any]], tokenizer: Any) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(
        [row["messages"] for row in rows], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    tokens: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return tokens


def _shorter_prompts(rows: list[dict[str, Any]], tokenizer: Any, max_length: int) -> list[dict[str, Any]]:
    lengths = [len(tokens) for tokens in _prompt_tokens(rows, tokenizer)]
    return _within(rows, lengths, max_length)


def _tokenize(rows: list[dict[str, Any]], tokenizer: Any, max_length: int | None) -> list[dict[str, Any]]:
    """Turn rows into the prompt's tokens (as a workflow renders them), the answer's, and the end-of-sequence token."""
    prompts = _prompt_tokens(rows, tokenizer)
    answers = tokenizer([row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    demonstrations = []
    for prompt, answer in zip(prompts, answers, strict=True):
        sampled = [*answer, tokenizer.eos_token_id]
        demonstrations.append({"input_ids": prompt + sampled, "loss_mask": [0] * len(prompt) + [1] * len(sampled)})
    lengths = [len(row["input_ids"]) for row in demonstrations]
    return demonstrations if max_length is None else _within(demonstrations, lengths, max_length)


def _within(rows: list[dict[str, Any]], lengths: list[int], max_length: int) -> list[dict[str, Any]]:
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= max_length]
    if len(kept) < len(rows):
        logger.warning(
            "dropped %d of %d rows longer than max_length %d tokens", len(rows) - len(kept), len(rows), max_length
        )
    if not kept:
        raise ValueError(f"max_length must leave some rows: got {max_length}, shortest row {min(lengths)}. Raise it.")
    return kept

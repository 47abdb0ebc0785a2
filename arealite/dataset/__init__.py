"""Data sets as plain lists of rows: prompts for reinforcement learning, token lists for supervised fine-tuning.

Prompts are read whole by whoever asks, in the order of the source, so that an index names the same prompt for the
whole run. Demonstrations are sharded: every rank gets equally many rows and no row is on two ranks.
"""

import logging
from typing import Any, Literal

from arealite.api.cli_args import DatasetConfig
from arealite.dataset.sources import read_rows

logger = logging.getLogger(__name__)


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
    rows = [
        {**row, "messages": [{"role": "user", "content": row["question"]}]}
        for row in read_rows(path, split or "train", seed)[:max_rows]
    ]
    if type == "rl":
        return rows if max_length is None else _within(rows, _prompt_tokens(rows, tokenizer), max_length)
    demonstrations = _tokenize(rows, tokenizer)
    if max_length is not None:
        demonstrations = _within(demonstrations, [row["input_ids"] for row in demonstrations], max_length)
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


def _prompt_tokens(rows: list[dict[str, Any]], tokenizer: Any) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(
        [row["messages"] for row in rows], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    tokens: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return tokens


def _tokenize(rows: list[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Turn rows into the prompt's tokens (as a workflow renders them), the answer's, and the end-of-sequence token."""
    prompts = _prompt_tokens(rows, tokenizer)
    answers = tokenizer([row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    demonstrations = []
    for prompt, answer in zip(prompts, answers, strict=True):
        sampled = [*answer, tokenizer.eos_token_id]
        demonstrations.append({"input_ids": prompt + sampled, "loss_mask": [0] * len(prompt) + [1] * len(sampled)})
    return demonstrations


def _within(rows: list[dict[str, Any]], tokens: list[list[int]], max_length: int) -> list[dict[str, Any]]:
    kept = [row for row, of_row in zip(rows, tokens, strict=True) if len(of_row) <= max_length]
    if num_dropped := len(rows) - len(kept):
        logger.warning("dropped %d of %d rows longer than max_length %d tokens", num_dropped, len(rows), max_length)
    if not kept:
        shortest = min(map(len, tokens))
        raise ValueError(f"max_length must leave some rows: got {max_length}, shortest row {shortest}. Raise it.")
    return kept

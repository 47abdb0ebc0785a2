"""Data sets as plain lists of rows: prompts for reinforcement learning, tokens for supervised fine-tuning, and pairs.

Prompts are read whole by whoever asks, in the order of the source, so that an index names the same prompt for the
whole run. Demonstrations and pairs are sharded: every rank gets equally many rows and no row is on two ranks.
"""

import logging
from typing import Any, Literal

from arealite.api.cli_args import BaseExperimentConfig, DatasetConfig
from arealite.dataset.images import expanded, images_of, show, with_known_keys
from arealite.dataset.sources import MissingSplitError, is_one_file, read_rows
from arealite.utils.chat_template import demonstration, prompt_tokens

logger = logging.getLogger(__name__)
Rows = list[dict[str, Any]]

TYPES = ("sft", "rl", "dpo", "rw")
_HELD_OUT = 0.05  # of the rows of a source without a test split


def get_custom_dataset(
    path: str,
    rank: int = 0,
    world_size: int = 1,
    type: Literal["sft", "rl", "dpo", "rw"] = "sft",
    split: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    max_rows: int | None = None,
    seed: int = 1,
    processor: Any = None,
    **columns: Any,
) -> Rows:
    """Load a data set; `columns` are the other keys of a `DatasetConfig`, such as `prompt_key`.

    `rl` rows are `{"messages", "answer", ...}` with all columns of the source, never sharded. `sft` rows are this
    rank's share of `{"input_ids", "loss_mask"}`, `dpo` and `rw` rows of `{"pair": [chosen, rejected]}`, each like a row
    of `sft`; up to `world_size - 1` rows at the end are left out so that all shares are equal. `max_rows` keeps
    the first so many rows of the source; `max_length` drops longer rows (for `rl`: longer prompts) and logs how many.
    `seed` is for data that a function generates, `processor` counts the tokens of images (`image_key`), which rows then
    have as `images`.
    """
    if type not in TYPES:
        raise ValueError(f"dataset type must be one of {', '.join(TYPES)}: got {type!r}. Set train_dataset.type.")
    if tokenizer is None and (type != "rl" or max_length is not None):
        raise ValueError(
            f"tokenizer must be given for type={type!r} or max_length: got None. Pass load_hf_tokenizer(...)."
        )
    config = DatasetConfig(path=path, type=type, max_length=max_length, max_rows=max_rows, **columns)
    rows = _prepare(read_rows(config, split or "train", seed), config, tokenizer, processor)
    if type == "rl":
        return rows
    share = len(rows) // world_size
    return rows[rank : share * world_size : world_size]


def load_datasets(config: BaseExperimentConfig, tokenizer: Any, processor: Any = None) -> tuple[Rows, Rows | None]:
    """Load training rows and held-out ones (None without a `valid_dataset` block), whole. See `get_custom_dataset`.

    Without a split of their own, the held-out rows are the last ones of the source, and never trained on. In an
    evaluation, which trains on none, they are all rows of the source.
    """
    train, valid = config.train_dataset, config.valid_dataset
    if tokenizer.chat_template is None:
        logger.warning("the tokenizer has no chat template: prompts are plain texts, without roles.")
    if not train.path and valid is not None:
        return [], _prepare(_read_whole(valid, config.seed), valid, tokenizer, processor)
    rows, held_out, first_held_out = read_rows(train, train.split or "train", config.seed), None, 0
    if valid is not None:
        is_own = valid.path != train.path or valid.split is not None
        try:
            if is_own or not is_one_file(valid.path):
                held_out = read_rows(valid, valid.split or "test", config.seed)
        except MissingSplitError:
            if is_own:
                raise
        if held_out is None:
            if len(rows) < 2:
                raise ValueError(
                    f"{train.path} must have a row for training and one to hold out: got one. Add rows, or set "
                    "valid_dataset=null."
                )
            num = max(1, round(_HELD_OUT * len(rows)))
            message = "%s has no test split: its last %d of %d rows are held out for evaluation, not trained on."
            logger.warning(message, train.path, num, len(rows))
            rows, held_out = rows[:-num], rows[-num:]
            first_held_out = len(rows)
    train_rows = _prepare(rows, train, tokenizer, processor)
    return train_rows, held_out and _prepare(held_out, valid or train, tokenizer, processor, first_held_out)


def _read_whole(config: DatasetConfig, seed: int) -> Rows:
    """Read the test split, or what there is instead, unless the config names a split."""
    try:
        return read_rows(config, config.split or "test", seed)
    except MissingSplitError:
        if config.split:
            raise
        logger.warning("%s has no test split: all rows of its training split are used.", config.path)
        return read_rows(config, "train", seed)


def _prepare(rows: Rows, config: DatasetConfig, tokenizer: Any, processor: Any, start: int = 0) -> Rows:
    """Turn rows of a source, from its row `start` on, into prompts, demonstrations or pairs."""
    config = with_known_keys(config)
    first = [(row, f"row {index} of {config.path}") for index, row in enumerate(rows[: config.max_rows], start)]
    if config.type in ("dpo", "rw"):
        if config.image_key:
            raise ValueError(
                f"pairs of answers must be about texts: got the image_key {config.image_key}. Use other data."
            )
        rows = [{"pair": _pair(row, where, config, tokenizer)} for row, where in first]
        longest = [max((one["input_ids"] for one in row["pair"]), key=len) for row in rows]
        return rows if config.max_length is None else _within(rows, longest, config.max_length)
    rows = [_with_messages(row, where, config) for row, where in first]
    if config.image_key and processor is None:
        raise ValueError(
            f"processor must be given for rows with images ({config.image_key} of {config.path}): got None. Use a "
            "script that shows images, such as clevr_count_70k_grpo.py: it passes load_image_processor(...)."
        )
    if config.type == "sft":
        told = _demonstrations(rows, tokenizer)
    elif tokenizer is None:
        return rows
    else:  # without a limit, the first row tells whether the template takes such conversations
        asked = rows[: None if config.max_length else 1]
        told = [{"input_ids": ids} for ids in prompt_tokens(tokenizer, [row["messages"] for row in asked])]
    if config.image_key:
        told = [expanded(one, row["images"], tokenizer, processor) for one, row in zip(told, rows, strict=False)]
    if config.type == "sft":
        shown = ({"images": row["images"]} if config.image_key else {} for row in rows)
        rows = [one | images for one, images in zip(told, shown, strict=True)]
    return rows if config.max_length is None else _within(rows, [one["input_ids"] for one in told], config.max_length)


def _with_messages(row: dict[str, Any], where: str, config: DatasetConfig) -> dict[str, Any]:
    """Add the conversation and, under the name that rewards know, the answer."""
    key = config.prompt_key or ("messages" if "messages" in row else "question")
    if (prompt := row.get(key)) is None:
        raise _missing(row, where, key, "prompt_key")
    messages = _messages(prompt, where, key, "prompt_key", config)
    if config.image_key:
        row = {**row, "images": images_of(row, where, config.image_key)}
        messages = show(messages, len(row["images"]), where)
    is_complete = messages[-1]["role"] == "assistant"
    if is_complete and config.type == "rl":
        raise ValueError(
            f"a prompt must end before the model's turn: got {key} that ends with an assistant's in {where}. "
            "Set train_dataset.prompt_key to a column without it."
        )
    if is_complete or (config.answer_key is None and config.type == "rl"):
        return {**row, "messages": messages}
    column = config.answer_key or "answer"
    if (value := row.get(column)) is None:
        advice = " (null if rewards need none)" if config.type == "rl" else ""
        raise _missing(row, where, column, "answer_key", advice)
    is_structured = config.type == "rl" and isinstance(value, list | dict)
    return {**row, "answer": value if is_structured else str(value), "messages": messages}


def _messages(content: Any, where: str, column: str, key: str, config: DatasetConfig) -> Rows:
    """Return the conversation in a column, with the system prompt and the suffix of the config."""
    messages = _turns(content)
    if not messages or not all(isinstance(one, dict) and one.get("role") and _has_text(one) for one in messages):
        raise ValueError(
            f"{column} must be a text or a list of messages with role and content: got {content!r:.100} in {where}. "
            f"Set train_dataset.{key} to such a column, or convert it."
        )
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
    if config.prompt_suffix and last is not None:
        content = messages[last]["content"]
        suffix = config.prompt_suffix if isinstance(content, str) else [{"type": "text", "text": config.prompt_suffix}]
        messages[last] = {**messages[last], "content": content + suffix}
    return messages


def _turns(content: Any) -> Rows:
    return [*content] if isinstance(content, list) else [{"role": "user", "content": str(content)}]


def _pair(row: dict[str, Any], where: str, config: DatasetConfig, tokenizer: Any) -> Rows:
    """Tokenize the chosen and the rejected answer; without a prompt, tokens that both begin with are not trained on."""
    key = config.prompt_key or "prompt"
    if config.prompt_key is not None and row.get(key) is None:
        raise _missing(row, where, key, "prompt_key")
    prompt = None if row.get(key) is None else _messages(row[key], where, key, "prompt_key", config)
    pair: Rows = []
    for name, column in (("chosen_key", config.chosen_key), ("rejected_key", config.rejected_key)):
        if (answer := row.get(column)) is None:
            raise _missing(row, where, column, name)
        if isinstance(answer, list):
            is_turn = bool(answer) and isinstance(answer[0], dict) and answer[0].get("role") == "assistant"
            whole = [*_turns(row[key]), *answer] if prompt is not None and is_turn else answer
            messages = _messages(whole, where, column, name, config)
            if messages[-1]["role"] != "assistant":
                raise ValueError(
                    f"{column} must end with the assistant's turn: got one that ends with {messages[-1]['role']} in "
                    f"{where}. Set train_dataset.{name} to a column of whole conversations or answers."
                )
            pair.append(demonstration(tokenizer, messages))
        elif prompt is not None:
            pair += _demonstrations([{"messages": prompt, "answer": str(answer)}], tokenizer)
        else:
            tokens = [*tokenizer(str(answer))["input_ids"], tokenizer.eos_token_id]
            pair.append({"input_ids": tokens, "loss_mask": [1] * len(tokens)})
    if prompt is None:
        chosen, rejected = (one["input_ids"] for one in pair)
        differ = (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
        shared = next(differ, min(len(chosen), len(rejected)))
        pair = [{**one, "loss_mask": [0] * shared + one["loss_mask"][shared:]} for one in pair]
    return pair


def _has_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    return isinstance(content, str) or is_parts or bool(message.get("tool_calls"))


def _missing(row: dict[str, Any], where: str, column: str, key: str, other: str = "") -> ValueError:
    columns = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in row.items())
    return ValueError(
        f"every row must have the column {column}: got {columns} in {where}. "
        f"Set train_dataset.{key} to the name of your column{other}, or drop the row."
    )


def _demonstrations(rows: Rows, tokenizer: Any) -> Rows:
    """Tokenize conversations; an answer of a row follows the prompt as a workflow renders it, and an end token."""
    if any(row["messages"][-1]["role"] == "assistant" for row in rows):
        return [demonstration(tokenizer, _completed(row)) for row in rows]
    prompts = prompt_tokens(tokenizer, [row["messages"] for row in rows])
    answers = tokenizer([row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    demonstrations = []
    for prompt, answer in zip(prompts, answers, strict=True):
        sampled = [*answer, tokenizer.eos_token_id]
        demonstrations.append({"input_ids": prompt + sampled, "loss_mask": [0] * len(prompt) + [1] * len(sampled)})
    return demonstrations


def _completed(row: dict[str, Any]) -> Rows:
    messages: Rows = row["messages"]
    is_complete = messages[-1]["role"] == "assistant"
    return messages if is_complete else [*messages, {"role": "assistant", "content": row["answer"]}]


def _within(rows: Rows, tokens: list[list[int]], max_length: int) -> Rows:
    kept = [row for row, of_row in zip(rows, tokens, strict=True) if len(of_row) <= max_length]
    if num_dropped := len(rows) - len(kept):
        logger.warning("dropped %d of %d rows longer than max_length %d tokens", num_dropped, len(rows), max_length)
    if not kept:
        shortest = min(map(len, tokens))
        raise ValueError(f"max_length must leave some rows: got {max_length}, shortest row {shortest}. Raise it.")
    return kept

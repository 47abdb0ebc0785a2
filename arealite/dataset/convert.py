"""Conversations from the user's columns, and training tokens from conversations."""

from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.chat.template import demonstration, prompt_tokens
from arealite.dataset.images import images_of, show
from arealite.dataset.rows import Row


def with_messages(row: Row, where: str, config: DatasetConfig) -> Row:
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


def _messages(content: Any, where: str, column: str, key: str, config: DatasetConfig) -> list[Row]:
    """Return the conversation in a column, with the system prompt and the suffix of the config."""
    messages = _turns(content)
    if not messages or not all(isinstance(turn, dict) and turn.get("role") and _has_text(turn) for turn in messages):
        raise ValueError(
            f"{column} must be a text or a list of messages with role and content: got {content!r:.100} in {where}. "
            f"Set train_dataset.{key} to such a column, or convert it."
        )
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    last = max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=None)
    if config.prompt_suffix and last is not None:
        content = messages[last]["content"]
        suffix = config.prompt_suffix if isinstance(content, str) else [{"type": "text", "text": config.prompt_suffix}]
        messages[last] = {**messages[last], "content": content + suffix}
    return messages


def _turns(content: Any) -> list[Row]:
    return [*content] if isinstance(content, list) else [{"role": "user", "content": str(content)}]


def pair_of(row: Row, where: str, config: DatasetConfig, tokenizer: Any) -> list[Row]:
    """Tokenize the chosen and the rejected answer; without a prompt, their common beginning is not trained on."""
    key = config.prompt_key or "prompt"
    if config.prompt_key is not None and row.get(key) is None:
        raise _missing(row, where, key, "prompt_key")
    prompt = None if row.get(key) is None else _messages(row[key], where, key, "prompt_key", config)
    pair: list[Row] = []
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
            rows = [{"messages": prompt, "answer": str(answer)}]
            pair += demonstrations(rows, tokenizer, prompt[-1]["role"] == "assistant")
        else:
            tokens = [*tokenizer(str(answer))["input_ids"], tokenizer.eos_token_id]
            pair.append({"input_ids": tokens, "loss_mask": [1] * len(tokens)})
    if prompt is None:
        chosen, rejected = (answer["input_ids"] for answer in pair)
        differ = (at for at, (first, second) in enumerate(zip(chosen, rejected, strict=False)) if first != second)
        shared = next(differ, min(len(chosen), len(rejected)))
        pair = [{**answer, "loss_mask": [0] * shared + answer["loss_mask"][shared:]} for answer in pair]
    return pair


def _has_text(message: Row) -> bool:
    content = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    return isinstance(content, str) or is_parts or bool(message.get("tool_calls"))


def _missing(row: Row, where: str, column: str, key: str, advice: str = "") -> ValueError:
    columns = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in row.items())
    return ValueError(
        f"every row must have the column {column}: got {columns} in {where}. "
        f"Set train_dataset.{key} to the name of your column{advice}, or drop the row."
    )


def demonstrations(rows: list[Row], tokenizer: Any, are_chats: bool) -> list[Row]:
    """Tokenize conversations, or prompts as a workflow renders them, followed by an answer and an end token."""
    if are_chats:
        return [demonstration(tokenizer, _completed(row)) for row in rows]
    prompts = prompt_tokens(tokenizer, [row["messages"] for row in rows])
    answers = tokenizer([row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    demonstrations = []
    for prompt, answer in zip(prompts, answers, strict=True):
        sampled = [*answer, tokenizer.eos_token_id]
        demonstrations.append({"input_ids": prompt + sampled, "loss_mask": [0] * len(prompt) + [1] * len(sampled)})
    return demonstrations


def _completed(row: Row) -> list[Row]:
    messages: list[Row] = row["messages"]
    is_complete = messages[-1]["role"] == "assistant"
    return messages if is_complete else [*messages, {"role": "assistant", "content": row["answer"]}]

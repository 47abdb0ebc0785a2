"""Conversations from the user's columns, with the places of their images, and training tokens from conversations."""

from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.chat.template import demonstration, prompt_tokens
from arealite.dataset.rows import Row
from arealite.utils.images import count_image_tokens, decode_image
from arealite.utils.token_ids import expansion, image_token_id

MARK = "<image>"  # in a text: the place of the next image

KNOWN: dict[str, dict[str, Any]] = {
    "clevr_count_70k": {
        "prompt_key": "problem",
        "image_key": "images",
        "system_prompt": "Count the objects in the image. Answer with their number in square brackets, such as [4].",
    },
    "geometry3k": {
        "prompt_key": "problem",
        "image_key": "images",
        "prompt_suffix": "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    },
}
"""By a part of the path: the keys of a config that does not set them."""


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


def with_known_keys(config: DatasetConfig) -> DatasetConfig:
    """Return the config with the keys of a known data set, unless it names columns of its own."""
    known = next((keys for name, keys in KNOWN.items() if name in config.path), {})
    unset = {key: value for key, value in known.items() if not getattr(config, key)}
    is_own = config.prompt_key is not None or config.image_key is not None
    return config if is_own else config.new(**unset)


def images_of(row: dict[str, Any], where: str, column: str) -> list[Any]:
    """Return the images in a column, one or a list."""
    value = row.get(column)
    images = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if not images:
        raise ValueError(
            f"every row must have images in {column}: got {value!r:.100} in {where}, which has the columns "
            f"{', '.join(row)}. Set train_dataset.image_key to their column, or drop the row."
        )
    return images


def show(messages: list[dict[str, Any]], num_images: int, where: str) -> list[dict[str, Any]]:
    """Return a conversation in parts, with an image at each `<image>`, or all images before the question."""
    parts = [_parts(turn["content"]) if turn["role"] == "user" else turn.get("content") for turn in messages]
    shown = [{**turn, "content": content} for turn, content in zip(messages, parts, strict=True)]
    questions = [turn["content"] for turn in shown if turn["role"] == "user"]
    num_marks = sum(part["type"] == "image" for content in questions for part in content)
    if num_marks == 0 and questions:
        questions[0][:0] = [{"type": "image"}] * num_images
    elif num_marks != num_images:
        raise ValueError(
            f"a prompt must show each of its images once: got {num_marks} marks {MARK} for {num_images} images in "
            f"{where}. Correct the row."
        )
    return shown


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [*content]
    first, *rest = content.split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def expanded(
    columns: dict[str, list[int]], images: Sequence[Any], tokenizer: Any, processor: Any
) -> dict[str, list[int]]:
    """Return `input_ids` and the columns aligned with them, with a placeholder for each token of the images."""
    num_tokens = [count_image_tokens(processor, decode_image(image)) for image in images]
    places = expansion(columns["input_ids"], num_tokens, image_token_id(tokenizer))
    return {key: [values[place] for place in places] for key, values in columns.items()}

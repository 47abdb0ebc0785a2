"""Converts rows of a source to prompts, demonstrations or pairs: each row is checked, tokenized and counted once.

The result is a table in the cache of `datasets`, which one process writes, see `written`.
"""

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from arealite import chat
from arealite.api.config.data import PAIRS, DatasetConfig
from arealite.chat.demonstration import demonstrations
from arealite.chat.template import prompt_tokens
from arealite.dataset.rows import CHUNK, Row, Rows, checksum_of, digest_of, digest_of_row, written
from arealite.utils import heartbeat
from arealite.utils.images import count_image_tokens, decode_image
from arealite.utils.token_ids import expansion, image_token_id

logger = logging.getLogger("arealite.dataset")
MARK = "<image>"  # marks the place of the next image in a text

_PROMPTS = ("messages", "conversations", "question", "prompt")  # columns, where prompt_key names none
_ROLES = {"human": "user", "gpt": "assistant", "function": "tool"}  # of ShareGPT's format
_TOKENS = {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("int8"))}
_PAIRS = {"pair": datasets.List(_TOKENS)}
_COLUMNS: dict[str, dict[str, Any]] = {"rl": {}, "sft": _TOKENS, "dpo": _PAIRS, "rw": _PAIRS}
_CHANGE_NO_ROW = {
    *("path", "config_name", "split", "max_rows", "batch_size", "shuffle", "drop_last", "weight", "mixed_with"),
}


def prepare_rows(rows: Rows, config: DatasetConfig, tokenizer: Any, processor: Any, start: int = 0) -> Rows:
    """Return rows of a source, from its row `start` on, as prompts, demonstrations or pairs.

    `processor` counts the tokens of images.
    """
    if config.image_key and config.type in PAIRS:
        raise ValueError(f"pairs of answers must be about texts: got the image_key {config.image_key}. Use other data.")
    if config.image_key and processor is None:
        raise ValueError(
            f"processor must be given for rows with images ({config.image_key} of {config.path}): got None. Use a "
            "script that shows images, such as clevr_count_70k_grpo.py: it passes load_image_processor(...)."
        )
    preparation = _Preparation(rows[: config.max_rows], config, tokenizer, processor, start)
    return preparation.rows_of(preparation.write())


@dataclasses.dataclass(frozen=True)
class _Preparation:
    rows: Rows
    config: DatasetConfig
    tokenizer: Any
    processor: Any
    start: int

    def write(self) -> datasets.Dataset:
        """Return an entry for each row that is kept, from the cache if it is there."""
        features = {"row": datasets.Value("int64"), "digest": datasets.Value("int64"), **_COLUMNS[self.config.type]}
        return written(self.entries, datasets.Features(features), self.key(), what=self.config.path)

    def key(self) -> str | None:
        """Return the key of the result in the cache; None for rows with images, as these may be files that change, and
        for a tokenizer in Python, whose content has no one text."""
        if self.config.image_key or not getattr(self.tokenizer, "is_fast", True):
            return None
        keys = {name: value for name, value in vars(self.config).items() if name not in _CHANGE_NO_ROW}
        parts = self.rows.content, json.dumps(keys, sort_keys=True), _tokenizer_content(self.tokenizer), _code_content()
        return digest_of(*(part.encode() for part in parts))

    def entries(self) -> Iterator[Row]:
        """Check all rows, and yield the index in the source, the digest and the tokens of each row that is kept."""
        config, num_kept, shortest = self.config, 0, None
        for first, converted in self._chunks():
            tokens = self._tokens(converted, first)
            made_of = ((at, made) for at, all_made in enumerate(tokens) for made in all_made)
            for at, made in made_of:
                if config.max_length:
                    length = max(len(answer["input_ids"]) for answer in made.get("pair", [made]))
                    shortest = min(length, length if shortest is None else shortest)
                    if length > config.max_length:
                        continue
                num_kept += 1
                own = {} if config.type == "rl" else made
                images = {"images": converted[at]["images"]} if config.image_key else {}
                yield {"row": first + at, "digest": digest_of_row((own or converted[at]) | images), **own}
        if num_kept == 0:
            raise ValueError(
                f"max_length must leave some rows: got {config.max_length}, shortest row {shortest}. Raise it."
            )

    def rows_of(self, entries: datasets.Dataset) -> Rows:
        """Return the rows that `entries` name: prompts from the source, tokens from the entries."""
        columns = entries.with_format("numpy")
        kept, checksum = columns["row"][:], checksum_of(columns["digest"][:])
        num_used = len(np.unique(kept))
        if num_dropped := len(self.rows) - num_used:
            message = "dropped %d of %d rows longer than max_length %d tokens"
            logger.warning(message, num_dropped, len(self.rows), self.config.max_length)
        if len(kept) > num_used:
            message = (
                "%d conversations of %s became %d rows: the chat template rewrites turns that others follow. "
                "Such a turn is the end of a row of its own, as it was sampled, and each turn is taught once."
            )
            logger.info(message, num_used, self.config.path, len(kept))
        if self.config.type == "rl":
            stored = self.rows.table.select(kept) if num_dropped else self.rows.table
            return Rows(stored, functools.partial(self._converted, where=f"a row of {self.config.path}"), checksum)
        if self.config.image_key:
            return Rows(entries.remove_columns("digest"), self._with_images, checksum)
        return Rows(entries.select_columns([*_COLUMNS[self.config.type]]), None, checksum)

    def _with_images(self, entry: Row) -> Row:
        index = entry.pop("row")
        return entry | {"images": images_of(self.rows[index], self._where(index), str(self.config.image_key))}

    def _chunks(self) -> Iterator[tuple[int, list[Row]]]:
        """Yield the first index and the converted rows of each chunk."""
        for first in range(0, len(self.rows), CHUNK):
            rows = self.rows.read(first, first + CHUNK)
            yield first, [self._converted(row, self._where(first + at)) for at, row in enumerate(rows)]
            heartbeat.tick()

    def _converted(self, row: Any, where: str) -> Row:
        if not isinstance(row, dict):
            raise ValueError(f"every row must have columns: got {type(row).__name__} in {where}. Correct it.")
        if self.config.type in PAIRS:
            return {"pair": pair_of(row, where, self.config, self.tokenizer)}
        return with_messages(row, where, self.config)

    def _where(self, index: int) -> str:
        return f"row {self.start + index} of {self.config.path}"

    def _tokens(self, rows: list[Row], first: int) -> list[list[Row]]:
        """Return what each row becomes; of prompts without a limit only the first of all is tokenized, as a trial."""
        config, tokenizer = self.config, self.tokenizer
        if config.type in PAIRS:
            return [[row] for row in rows]
        if config.type == "sft":
            tokens = [self._demonstrations(row, self._where(first + at)) for at, row in enumerate(rows)]
        else:
            num_tried = 0 if tokenizer is None else len(rows) if config.max_length else int(first == 0)
            prompts = self._prompts(rows[:num_tried], first) if num_tried else []
            tokens = [[{"input_ids": ids}] for ids in prompts] + [[{}] for _ in rows[num_tried:]]
        if config.image_key:
            for made, row in zip(tokens, rows, strict=True):
                made[:] = [expanded(one, row["images"], tokenizer, self.processor) if one else one for one in made]
        return tokens

    def _prompts(self, rows: list[Row], first: int) -> list[list[int]]:
        conversations = [row["messages"] for row in rows]
        try:
            return prompt_tokens(self.tokenizer, conversations)
        except ValueError:
            for at, messages in enumerate(conversations):
                with _naming(self._where(first + at)):
                    prompt_tokens(self.tokenizer, [messages])
            raise

    def _demonstrations(self, row: Row, where: str) -> list[Row]:
        """Return the rows that a conversation becomes, or a prompt that its answer follows."""
        messages, tokenizer = row["messages"], self.tokenizer
        with _naming(where):
            is_asked = messages[-1]["role"] != "assistant"
            if is_asked and tokenizer.chat_template is None:
                return [_without_template(tokenizer, messages, row["answer"])]
            if is_asked:
                messages = [*messages, {"role": "assistant", "content": row["answer"]}]
            tools = row.get("tools")
            made = demonstrations(tokenizer, messages, tools=json.loads(tools) if isinstance(tools, str) else tools)
            if len(made) > 1 and self.config.image_key:
                raise ValueError(
                    f"the chat template of {tokenizer.name_or_path} must keep earlier turns of conversations with "
                    "images as they are: got one that rewrites some. Use another chat_template.jinja."
                )
            return made


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the row before what its template refuses."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _without_template(tokenizer: Any, prompt: list[Row], answer: str) -> Row:
    """Return the tokens of plain texts, and the end token."""
    (ids,) = prompt_tokens(tokenizer, [prompt])
    taught = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": ids + taught, "loss_mask": [0] * len(ids) + [1] * len(taught)}


def _tokenizer_content(tokenizer: Any) -> str:
    """Return a text that changes when a tokenizer does, or its chat template, which may show the special tokens."""
    if tokenizer is None:
        return ""
    return f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.special_tokens_map} {tokenizer.chat_template}"


@functools.cache
def _code_content() -> str:
    """Return a digest that changes when the code that makes tokens of rows does."""
    folders = Path(__file__).parent, Path(chat.__path__[0])
    versions = [version(name).encode() for name in ("transformers", "tokenizers", "jinja2")]
    return digest_of(*versions, *(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py"))))


def with_messages(row: Row, where: str, config: DatasetConfig) -> Row:
    """Add the conversation and, under the name that rewards know, the answer."""
    key = config.prompt_key or next((name for name in _PROMPTS if name in row), "question")
    prompt = _required(row, where, key, "prompt_key")
    column = config.answer_key or "answer"
    if column == "answer" and column not in row and config.type == "sft" and "completion" in row:
        column = "completion"
    if config.type == "sft" and isinstance(told := column_of(row, column), list):
        prompt = [*_turns(prompt), *told]
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
    advice = " (null if rewards need none)" if config.type == "rl" else ""
    value = _required(row, where, column, "answer_key", advice)
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


def column_of(row: Row, name: str) -> Any:
    """Return the value of a column, or at a path of names with dots in nested ones; None if there is none."""
    if name in row or "." not in name:
        return row.get(name)
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return column_of(inner, rest) if isinstance(inner, dict) else None


def _turns(content: Any) -> list[Any]:
    """Return a conversation, or a text as the user's turn; turns of ShareGPT's format get the usual keys."""
    if not isinstance(content, list):
        return [{"role": "user", "content": str(content)}]
    return [_usual(turn) if isinstance(turn, dict) and "role" not in turn else turn for turn in content]


def _usual(turn: Row) -> Row:
    if (said_by := turn.get("from")) is None:
        return turn
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(said_by, said_by), "content": turn.get("value"), **rest}


def pair_of(row: Row, where: str, config: DatasetConfig, tokenizer: Any) -> list[Row]:
    """Tokenize the chosen and the rejected answer; their common beginning is not trained on."""
    key = config.prompt_key or "prompt"
    given = column_of(row, key) if config.prompt_key is None else _required(row, where, key, "prompt_key")
    prompt = None if given is None else _messages(given, where, key, "prompt_key", config)
    conversations: list[list[Row] | str] = []
    for name, column in (("chosen_key", config.chosen_key), ("rejected_key", config.rejected_key)):
        answer = _required(row, where, column, name)
        if not isinstance(answer, list):
            said = {"role": "assistant", "content": str(answer)}
            conversations.append(str(answer) if prompt is None else [*prompt, said])
            continue
        answer = _turns(answer)
        is_turn = bool(answer) and isinstance(answer[0], dict) and answer[0].get("role") == "assistant"
        whole = [*_turns(given), *answer] if prompt is not None and is_turn else answer
        messages = _messages(whole, where, column, name, config)
        if messages[-1]["role"] != "assistant":
            raise ValueError(
                f"{column} must end with the assistant's turn: got one that ends with {messages[-1]['role']} in "
                f"{where}. Set train_dataset.{name} to a column of whole conversations or answers."
            )
        conversations.append(messages)
    with _naming(where):
        pair = [_answer_of_pair(tokenizer, one, conversations) for one in conversations]
    if prompt is None:
        chosen, rejected = (answer["input_ids"] for answer in pair)
        differ = (at for at, (first, second) in enumerate(zip(chosen, rejected, strict=False)) if first != second)
        shared = next(differ, min(len(chosen), len(rejected)))
        pair = [{**answer, "loss_mask": [0] * shared + answer["loss_mask"][shared:]} for answer in pair]
    return pair


def _answer_of_pair(tokenizer: Any, answer: list[Row] | str, both: Sequence[list[Row] | str]) -> Row:
    """Tokenize an answer, of which the messages that both have are the prompt."""
    if isinstance(answer, str):
        tokens = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        return {"input_ids": tokens, "loss_mask": [1] * len(tokens)}
    if tokenizer.chat_template is None:
        *prompt, said = answer
        return _without_template(tokenizer, prompt, said["content"])
    differ = (at for at, (one, other) in enumerate(zip(*both, strict=False)) if one != other)
    first = next(differ, len(answer) - 1)
    row, *others = demonstrations(tokenizer, answer, first=min(first, len(answer) - 1))
    if others:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} must keep the turns of an answer as they are: got one that "
            "rewrites some of a pair, whose answers must each be one row. Use answers of one turn, or another template."
        )
    return row


def _has_text(message: Row) -> bool:
    content = message.get("content")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    return isinstance(content, str) or is_parts or bool(message.get("tool_calls"))


def _required(row: Row, where: str, column: str, key: str, advice: str = "") -> Any:
    """Return the value of a column that `key` of the config names."""
    if (value := column_of(row, column)) is not None:
        return value
    columns = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in row.items())
    raise ValueError(
        f"every row must have the column {column}: got {columns} in {where}. "
        f"Set train_dataset.{key} to the name of your column{advice}, or drop the row."
    )


def images_of(row: dict[str, Any], where: str, column: str) -> list[Any]:
    """Return the images in a column, one or a list."""
    value = column_of(row, column)
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

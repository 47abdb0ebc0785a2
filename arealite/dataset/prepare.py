"""Rows of a source as prompts, demonstrations or pairs: each is checked, tokenized and counted once.

The result is a data set in the cache of `datasets`. One process of those that share the cache writes it under the lock
of that library; the others wait for the lock and map what was written.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from arealite import chat
from arealite.api.config.data import PAIRS, DatasetConfig
from arealite.chat.template import prompt_tokens
from arealite.dataset.convert import demonstrations, expanded, images_of, pair_of, with_known_keys, with_messages
from arealite.dataset.rows import CHUNK, ArrowRows, Row, Rows, checksum_of, digest_of, digest_of_row
from arealite.utils import heartbeat
from arealite.utils.files import free_space

logger = logging.getLogger("arealite.dataset")

_TOKENS = {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("int8"))}
_PAIRS = {"pair": datasets.List(_TOKENS)}
_COLUMNS: dict[str, dict[str, Any]] = {"rl": {}, "sft": _TOKENS, "dpo": _PAIRS, "rw": _PAIRS}
_CHANGE_NO_ROW = {
    *("path", "config_name", "split", "max_rows", "batch_size", "shuffle", "drop_last", "weight", "mixed_with"),
}


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tokenizer, and the processor that counts the tokens of images."""

    tokenizer: Any
    processor: Any = None

    @functools.cached_property
    def content(self) -> str:
        """A digest that changes when the tokenizer or our code does."""
        return _tokenizer_content(self.tokenizer) + _code_content()


def prepare_rows(rows: Rows, config: DatasetConfig, tools: Tools, start: int = 0) -> Rows:
    """Return rows of a source, from its row `start` on, as prompts, demonstrations or pairs."""
    config = with_known_keys(config)
    if config.image_key and config.type in PAIRS:
        raise ValueError(f"pairs of answers must be about texts: got the image_key {config.image_key}. Use other data.")
    if config.image_key and tools.processor is None:
        raise ValueError(
            f"processor must be given for rows with images ({config.image_key} of {config.path}): got None. Use a "
            "script that shows images, such as clevr_count_70k_grpo.py: it passes load_image_processor(...)."
        )
    preparation = _Preparation(rows[: config.max_rows], config, tools, start)
    with heartbeat.waiting(f"the rows of {config.path} to be prepared", on="ranks"):
        return preparation.rows_of(preparation.write())


@dataclasses.dataclass(frozen=True)
class _Preparation:
    rows: Rows
    config: DatasetConfig
    tools: Tools
    start: int

    def write(self) -> datasets.Dataset:
        """Return an entry for each row that is kept, from the cache if it is there."""
        root, key = Path(datasets.config.HF_DATASETS_CACHE) / "arealite", self.key()
        features = datasets.Features(
            {"row": datasets.Value("int64"), "digest": datasets.Value("int64"), **_COLUMNS[self.config.type]}
        )
        try:
            root.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                # Without a key the result is for this process only: the files stay mapped when their folder is removed.
                folder = root if key else stack.enter_context(tempfile.TemporaryDirectory(dir=root))
                return _from_generator(self.entries, features, str(folder), key or "none")
        except OSError as error:
            raise OSError(
                f"{root} must be a folder that can be written and locked: got {error}, with {free_space(root)}. "
                "Set HF_DATASETS_CACHE to another folder."
            ) from error

    def key(self) -> str | None:
        """Return the key of the result in the cache; None for rows with images, as these may be files that change."""
        if self.config.image_key or (content := self.rows.content) is None:
            return None
        keys = {name: value for name, value in vars(self.config).items() if name not in _CHANGE_NO_ROW}
        return digest_of(content.encode(), json.dumps(keys, sort_keys=True).encode(), self.tools.content.encode())

    def entries(self) -> Iterator[Row]:
        """Check all rows, and yield of each that is kept its index in the source, its digest and its tokens."""
        config, num_kept, shortest = self.config, 0, None
        # One conversation among the demonstrations makes all of them be rendered as conversations.
        are_chats = config.type == "sft" and self._any_complete()
        for first, converted in self._chunks():
            tokens = self._tokens(converted, first, are_chats)
            for at, row in enumerate(converted):
                if config.max_length:
                    length = _length(tokens[at])
                    shortest = min(length, length if shortest is None else shortest)
                    if length > config.max_length:
                        continue
                num_kept += 1
                made = {} if config.type == "rl" else tokens[at]
                images = {"images": row["images"]} if config.image_key else {}
                yield {"row": first + at, "digest": digest_of_row((made or row) | images), **made}
        if num_kept == 0:
            raise ValueError(
                f"max_length must leave some rows: got {config.max_length}, shortest row {shortest}. Raise it."
            )

    def rows_of(self, entries: datasets.Dataset) -> Rows:
        """Return the rows that `entries` name: prompts from the source, tokens from the entries."""
        columns = entries.with_format("numpy")
        kept, checksum = columns["row"][:], checksum_of(columns["digest"][:])
        if num_dropped := len(self.rows) - len(kept):
            message = "dropped %d of %d rows longer than max_length %d tokens"
            logger.warning(message, num_dropped, len(self.rows), self.config.max_length)
        if self.config.type == "rl":
            return Rows(self.rows, kept if num_dropped else None, self._converted, checksum)
        stored = ArrowRows(entries.select_columns([*_COLUMNS[self.config.type]]))
        return Rows(stored, None, self._with_images(kept) if self.config.image_key else None, checksum)

    def _with_images(self, kept: Any) -> Any:
        def make(row: Row, index: int) -> Row:
            source = int(kept[index])
            return row | {"images": images_of(self.rows[source], self._where(source), str(self.config.image_key))}

        return make

    def _any_complete(self) -> bool:
        """Check all rows before the long work, and return whether one is a whole conversation."""
        last = {row["messages"][-1]["role"] for _, rows in self._chunks() for row in rows}
        return "assistant" in last

    def _chunks(self) -> Iterator[tuple[int, list[Row]]]:
        """Yield the first index and the converted rows of each chunk."""
        for first in range(0, len(self.rows), CHUNK):
            rows = self.rows.read(first, first + CHUNK)
            yield first, [self._converted(row, first + at) for at, row in enumerate(rows)]
            heartbeat.tick()

    def _converted(self, row: Any, index: int) -> Row:
        if not isinstance(row, dict):
            raise ValueError(
                f"every row of {self.config.path} must have columns: got {type(row).__name__} in row "
                f"{self.start + index}. Correct it."
            )
        if self.config.type in PAIRS:
            return {"pair": pair_of(row, self._where(index), self.config, self.tools.tokenizer)}
        return with_messages(row, self._where(index), self.config)

    def _where(self, index: int) -> str:
        return f"row {self.start + index} of {self.config.path}"

    def _tokens(self, rows: list[Row], first: int, are_chats: bool) -> list[Row]:
        """Return the tokens of rows; of prompts without a limit those of the first row only, to try the template."""
        tokenizer = self.tools.tokenizer
        if self.config.type in PAIRS:
            return rows
        if self.config.type == "sft":
            tokens = demonstrations(rows, tokenizer, are_chats)
        elif tokenizer is None or (first > 0 and self.config.max_length is None):
            return []
        else:
            prompts = rows if self.config.max_length else rows[:1]
            tokens = [{"input_ids": ids} for ids in prompt_tokens(tokenizer, [row["messages"] for row in prompts])]
        if self.config.image_key:
            processor = self.tools.processor
            pairs = zip(tokens, rows, strict=False)
            tokens = [expanded(columns, row["images"], tokenizer, processor) for columns, row in pairs]
        return tokens


def _length(tokens: Row) -> int:
    return max(len(answer["input_ids"]) for answer in tokens.get("pair", [tokens]))


def _from_generator(entries: Any, features: datasets.Features, folder: str, key: str) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(entries, features, folder, fingerprint=key)
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None  # e.g. what is wrong with a row


def _tokenizer_content(tokenizer: Any) -> str:
    """Return a digest that changes when the files of a tokenizer do, or its chat template."""
    if tokenizer is None:
        return ""
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        special = f"{tokenizer.chat_template} {tokenizer.eos_token_id}"
        return digest_of(
            special.encode(), *(part for path in files for part in (path.name.encode(), path.read_bytes()))
        )


@functools.cache
def _code_content() -> str:
    """Return a digest that changes when the code that makes tokens of rows does."""
    folders = Path(__file__).parent, Path(chat.__path__[0])
    versions = [version(name).encode() for name in ("transformers", "tokenizers", "jinja2")]
    return digest_of(*versions, *(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py"))))

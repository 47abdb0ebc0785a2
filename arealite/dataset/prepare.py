"""Rows of a source as prompts, demonstrations or pairs: each is checked, tokenized and counted once, see `cache.py`."""

import dataclasses
import functools
import json
import logging
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

from arealite.api.cli_args import DatasetConfig
from arealite.chat.template import prompt_tokens
from arealite.dataset.cache import chunks, code_content, made_once, tokenizer_content
from arealite.dataset.convert import demonstrations, pair_of, with_messages
from arealite.dataset.images import expanded, images_of, with_known_keys
from arealite.dataset.rows import ArrowRows, Checksum, Row, Rows, digest_of

logger = logging.getLogger("arealite.dataset")

_TOKENS = {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("int8"))}
_PAIRS = {"pair": datasets.List(_TOKENS)}
_CHANGE_NO_ROW = {
    *("path", "config_name", "split", "max_rows", "batch_size", "shuffle", "drop_last", "weight", "mixed_with"),
}


@dataclasses.dataclass(frozen=True)
class Tools:
    """What makes tokens of texts, and counts those of images."""

    tokenizer: Any
    processor: Any = None

    @functools.cached_property
    def content(self) -> str:
        """What changes when the tokenizer or our code does."""
        return tokenizer_content(self.tokenizer) + code_content()


def prepare(rows: Rows, config: DatasetConfig, tools: Tools, start: int = 0) -> Rows:
    """Return rows of a source, from its row `start` on, as prompts, demonstrations or pairs."""
    config = with_known_keys(config)
    if config.image_key and config.type in ("dpo", "rw"):
        raise ValueError(f"pairs of answers must be about texts: got the image_key {config.image_key}. Use other data.")
    if config.image_key and tools.processor is None:
        raise ValueError(
            f"processor must be given for rows with images ({config.image_key} of {config.path}): got None. Use a "
            "script that shows images, such as clevr_count_70k_grpo.py: it passes load_image_processor(...)."
        )
    preparation = _Preparation(rows[: config.max_rows], config, tools, start)
    return made_once(preparation.key(), preparation.write, preparation.load)


@dataclasses.dataclass(frozen=True)
class _Preparation:
    rows: Rows
    config: DatasetConfig
    tools: Tools
    start: int

    def key(self) -> str | None:
        """Return the name of the result in the cache; images may be files that change, so their rows have none."""
        if self.config.image_key or (content := self.rows.content) is None:
            return None
        keys = {name: value for name, value in vars(self.config).items() if name not in _CHANGE_NO_ROW}
        return digest_of(content.encode(), json.dumps(keys, sort_keys=True).encode(), self.tools.content.encode())

    def write(self, folder: Path) -> None:
        """Check all rows and write into a folder which of them stay, what they are as tokens, and their checksum."""
        config, checksum, kept, shortest = self.config, Checksum(), array("q"), None
        # One conversation among the demonstrations makes all of them be rendered as conversations.
        are_chats = config.type == "sft" and self._any_complete(folder)
        with ExitStack() as stack:
            writer = None
            if config.type != "rl":
                features = datasets.Features(_TOKENS if config.type == "sft" else _PAIRS)
                writer = stack.enter_context(ArrowWriter(path=str(folder / "rows.arrow"), features=features))
            for first, chunk in chunks(self.rows, f"preparing {config.path}", folder):
                converted = [self._converted(row, first + at) for at, row in enumerate(chunk)]
                told = self._tokens(converted, first, are_chats)
                lengths = [_length(one) for one in told] if config.max_length else []
                shortest = min([*lengths, *([] if shortest is None else [shortest])], default=None)
                chosen = [at for at in range(len(chunk)) if not lengths or lengths[at] <= (config.max_length or 0)]
                kept.extend(first + at for at in chosen)
                tokens = [told[at] for at in chosen] if writer is not None else []
                for at in chosen:
                    row = told[at] if writer is not None else converted[at]
                    images = {"images": converted[at]["images"]} if config.image_key else {}
                    checksum.update(row | images)
                if writer is not None and tokens:
                    writer.write_table(pa.Table.from_pylist(tokens, schema=features.arrow_schema))
            if not kept:
                raise ValueError(
                    f"max_length must leave some rows: got {config.max_length}, shortest row {shortest}. Raise it."
                )
            if writer is not None:
                writer.finalize()
        np.save(folder / "kept.npy", np.frombuffer(kept, dtype=np.int64))
        (folder / "checksum").write_text(str(checksum.value))

    def load(self, folder: Path) -> Rows:
        """Map what `write` has written."""
        kept: Any = np.load(folder / "kept.npy")
        checksum = int((folder / "checksum").read_text())
        if num_dropped := len(self.rows) - len(kept):
            told = "dropped %d of %d rows longer than max_length %d tokens"
            logger.warning(told, num_dropped, len(self.rows), self.config.max_length)
        if self.config.type == "rl":
            return Rows(self.rows, kept if num_dropped else None, self._converted, checksum)
        stored = ArrowRows(datasets.Dataset.from_file(str(folder / "rows.arrow")))
        return Rows(stored, None, self._with_images(kept) if self.config.image_key else None, checksum)

    def _with_images(self, kept: Any) -> Any:
        def make(row: Row, index: int) -> Row:
            source = int(kept[index])
            return row | {"images": images_of(self.rows[source], self._where(source), str(self.config.image_key))}

        return make

    def _any_complete(self, folder: Path) -> bool:
        """Check all rows before the long work; tell whether one is a whole conversation."""
        found = False
        for first, chunk in chunks(self.rows, f"checking {self.config.path}", folder):
            converted = [self._converted(row, first + at) for at, row in enumerate(chunk)]
            found = found or any(row["messages"][-1]["role"] == "assistant" for row in converted)
        return found

    def _converted(self, row: Any, index: int) -> Row:
        if not isinstance(row, dict):
            raise ValueError(
                f"every row of {self.config.path} must have columns: got {type(row).__name__} in row "
                f"{self.start + index}. Correct it."
            )
        if self.config.type in ("dpo", "rw"):
            return {"pair": pair_of(row, self._where(index), self.config, self.tools.tokenizer)}
        return with_messages(row, self._where(index), self.config)

    def _where(self, index: int) -> str:
        return f"row {self.start + index} of {self.config.path}"

    def _tokens(self, rows: list[Row], first: int, are_chats: bool) -> list[Row]:
        """Return the tokens of rows; of prompts without a limit the first row's, to see that the template takes it."""
        tokenizer = self.tools.tokenizer
        if self.config.type in ("dpo", "rw"):
            return rows
        if self.config.type == "sft":
            told = demonstrations(rows, tokenizer, are_chats)
        elif tokenizer is None or (first > 0 and self.config.max_length is None):
            return []
        else:
            asked = rows if self.config.max_length else rows[:1]
            told = [{"input_ids": ids} for ids in prompt_tokens(tokenizer, [row["messages"] for row in asked])]
        if self.config.image_key:
            found = zip(told, rows, strict=False)
            told = [expanded(one, row["images"], tokenizer, self.tools.processor) for one, row in found]
        return told


def _length(tokens: Row) -> int:
    return max(len(one["input_ids"]) for one in tokens.get("pair", [tokens]))

"""Rows with images: their places in a conversation, their number of tokens, and the keys of known data sets."""

from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import DatasetConfig
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

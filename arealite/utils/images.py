"""Images of prompts, for models of the Qwen2-VL type.

Such a model sees images as patches, `pixel_values [P, D]`, in grids of (time, height, width), `image_grid_thw [I, 3]`.
`merge x merge` patches become one token, for which the prompt has a placeholder (`utils/token_ids.py`).
"""

# I images, P patches, L tokens of one sequence

import base64
import functools
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others may run programs
KEYS = ("pixel_values", "image_grid_thw")  # of a batch, `[B, P, D]` and `[B, I, 3]`


def sees_images(config: Any) -> bool:
    """Return True if the model of a Hugging Face config is of a supported vision type."""
    return getattr(config, "model_type", None) in MODEL_TYPES


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one prompt as inputs of the model."""

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor
    merge: int

    @property
    def num_tokens(self) -> list[int]:
        """Placeholders of each image."""
        return [patches // self.merge**2 for patches in self.grid_thw.prod(-1).tolist()]

    @functools.cached_property
    def position_shift(self) -> int:
        """The rotary position of a token after the images minus its index; negative."""
        sides = (self.grid_thw[:, 1:].amax(-1) // self.merge).sum()
        return int(sides) - sum(self.num_tokens)


def process_images(processor: Any, images: Iterable[Any]) -> Images:
    """Turn decoded images into patches; `processor` is a Hugging Face processor or image processor."""
    image_processor = image_processor_of(processor)
    inputs = image_processor(images=list(images), return_tensors="pt")
    return Images(inputs["pixel_values"].float(), inputs["image_grid_thw"].long(), image_processor.merge_size)


def image_processor_of(processor: Any) -> Any:
    """Return the image processor of a Hugging Face processor, or an image processor itself."""
    image_processor = getattr(processor, "image_processor", processor)
    if not hasattr(image_processor, "merge_size") or not hasattr(image_processor, "get_number_of_image_patches"):
        raise ValueError(
            "the image processor must be of the Qwen2-VL type: got "
            f"{type(image_processor).__name__}. Use a model of the types {', '.join(MODEL_TYPES)}."
        )
    return image_processor


def count_image_tokens(processor: Any, image: Any) -> int:
    """Return the number of image tokens of a decoded image without making its patches."""
    image_processor = image_processor_of(processor)
    patches: int = image_processor.get_number_of_image_patches(image.height, image.width)
    return patches // image_processor.merge_size**2


def placeholder_mask(ids_L: torch.Tensor, num_tokens: int, token_id: int) -> torch.Tensor:
    """Return the bool mask `[L]` of the `num_tokens` image tokens of a sequence."""
    of_id = ids_L == token_id
    is_image = of_id & (of_id.cumsum(0) <= num_tokens)
    if int(is_image.sum()) != num_tokens:
        raise ValueError(
            f"a sequence must have a placeholder for each of the {num_tokens} tokens of its images: got "
            f"{int(is_image.sum())}. Make both with one image processor, and cut no prompt."
        )
    return is_image


def rope_positions(is_image_L: torch.Tensor, grid_thw: torch.Tensor, merge: int) -> torch.Tensor:
    """Return the rotary positions (time, height, width) `[3, L]` of a sequence with placeholders.

    An image token has its image's first position plus its place in the grid; text continues after the longest side.
    """
    starts = is_image_L.nonzero().flatten()
    positions = torch.empty(3, len(is_image_L), dtype=torch.long)
    place = following = used = 0
    for time, height, width in grid_thw.tolist():
        height, width = height // merge, width // merge
        start = int(starts[used])
        positions[:, place:start] = torch.arange(start - place) + following
        following += start - place
        place, used = start + time * height * width, used + time * height * width
        grid = torch.meshgrid(torch.arange(time), torch.arange(height), torch.arange(width), indexing="ij")
        positions[:, start:place] = torch.stack(grid).flatten(1) + following
        following += max(height, width)
    positions[:, place:] = torch.arange(len(is_image_L) - place) + following
    return positions


def decode_image(image: Any) -> Any:
    """Return a PIL image from a PIL image, encoded bytes, a file, or a `{"bytes", "path"}` of Hugging Face datasets."""
    from PIL import Image  # optional

    if isinstance(image, dict):
        image = image["bytes"] if image.get("bytes") is not None else image.get("path")
    if isinstance(image, bytes | str | Path):
        source = io.BytesIO(image) if isinstance(image, bytes) else image
        try:
            return Image.open(source, formats=FORMATS)
        except (OSError, Image.DecompressionBombError) as error:
            raise ValueError(f"an image must be a file that PIL can read: got {error}. Convert or drop it.") from error
    if not isinstance(image, Image.Image):
        raise ValueError(f"an image must be a PIL image, bytes or a path: got {type(image).__name__}. Convert it.")
    return image


def as_base64(image: Any) -> str:
    """Return an image in base64: encoded bytes as they are, any other image as PNG."""
    encoded = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(encoded, bytes):
        file = io.BytesIO()
        decode_image(image).convert("RGB").save(file, "PNG")
        encoded = file.getvalue()
    return base64.b64encode(encoded).decode()


def from_base64(text: str) -> Any:
    """Return the PIL image of base64 or a data URL. It comes from a client, so no URL or file is opened."""
    head, comma, tail = text.partition(",")
    try:
        image = decode_image(base64.b64decode(tail if comma and head.startswith("data:") else text, validate=True))
        image.load()
    except Exception as error:  # PIL raises many types for damaged files, such as SyntaxError
        raise ValueError(f"image_data must be base64 of an image file: got {error}. Encode the file.") from error
    return image

"""Tiny vision models, pictures and batches of rows that show them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tensordict import TensorDict
from testing_quickstart import make_tiny_vision_model

from arealite.utils.hf import load_hf_tokenizer, load_image_processor
from arealite.utils.images import process_images
from arealite.utils.tensors import concat_padded_tensors
from arealite.utils.token_ids import expansion, image_token_id

SIZES = {"small": (56, 56), "wide": (112, 56), "tall": (56, 84)}
"""Of pictures, which become 4, 8 and 6 tokens."""


def picture(size: str = "small", seed: int = 0) -> Image.Image:
    """Return a picture of noise."""
    width, height = SIZES[size]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def row_of(folder: str, pictures: list[Image.Image], num_sampled: int, seed: int = 0) -> TensorDict:
    """Return a row of a prompt that shows the pictures, and random tokens after it."""
    tokenizer, processor = load_hf_tokenizer(folder), load_image_processor(folder)
    content = [*[{"type": "image"} for _ in pictures], {"type": "text", "text": "What is it?"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    ids: list[int] = tokenizer(text)["input_ids"]
    images = process_images(processor, pictures) if pictures else None
    if images is not None:
        ids = [ids[place] for place in expansion(ids, images.num_tokens, image_token_id(tokenizer))]
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.randint(10, len(tokenizer), (num_sampled,), generator=generator).tolist()
    row: dict[str, Any] = {
        "input_ids": torch.tensor([ids + sampled]),
        "attention_mask": torch.ones(1, len(ids) + num_sampled, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * len(ids) + [1] * num_sampled]),
        "pixel_values": torch.zeros(1, 0, 3 * 2 * 14 * 14) if images is None else images.pixel_values[None],
        "image_grid_thw": torch.zeros(1, 0, 3, dtype=torch.long) if images is None else images.grid_thw[None],
    }
    return TensorDict(row, batch_size=[1])


def vision_batch(folder: str) -> TensorDict:
    """Return rows of no, one and two pictures; one has sampled the id of the placeholder."""
    shown = [["wide"], [], ["small", "tall"], ["small"], ["tall"]]
    rows = [
        row_of(folder, [picture(size, seed=10 * index + n) for n, size in enumerate(sizes)], 5 + index, seed=index)
        for index, sizes in enumerate(shown)
    ]
    rows[3]["input_ids"][0, -2] = image_token_id(load_hf_tokenizer(folder))
    return concat_padded_tensors(rows)


def write_model(folder: Path, **changes: Any) -> str:
    return str(make_tiny_vision_model(folder, **{"min_pixels": 28 * 28, "max_pixels": 112 * 112} | changes))

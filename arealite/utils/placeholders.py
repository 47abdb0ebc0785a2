"""Placeholders of images in token ids: one per image where a prompt is written or sent, one per token where it is run.

Placeholders are the first ones of their id in a sequence: a model may sample that id too, as a token like any other.
"""

from collections.abc import Sequence
from typing import Any


def image_token_id(tokenizer: Any) -> int:
    """Return the id of the placeholder in prompts."""
    token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
    if (found := tokenizer.get_vocab().get(token)) is None:
        raise ValueError(f"the tokenizer must have {token}, which stands for images: it has not. Use a vision model.")
    return int(found)


def expansion(ids: Sequence[int], num_tokens: Sequence[int], token_id: int) -> list[int]:
    """Return the places in `ids` that make a prompt with one placeholder per image one with `num_tokens` of each."""
    holders = [place for place, token in enumerate(ids) if token == token_id][: len(num_tokens)]
    if len(holders) < len(num_tokens):
        raise ValueError(
            f"a prompt must have a placeholder for each image: got {len(holders)} for {len(num_tokens)}. Mark each "
            "image's place, and use a chat template that knows images."
        )
    times = dict(zip(holders, num_tokens, strict=True))
    return [place for place in range(len(ids)) for _ in range(times.get(place, 1))]


def collapse(ids: Sequence[int], num_images: int, token_id: int) -> list[int]:
    """Invert the expansion of the first `num_images` placeholders."""
    collapsed: list[int] = []
    num_seen = 0
    for place, token in enumerate(ids):
        is_holder = token == token_id and num_seen <= num_images
        if is_holder and place and ids[place - 1] == token_id:
            continue
        num_seen += is_holder
        collapsed.append(token)
    return collapsed

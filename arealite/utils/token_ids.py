"""Sequences of token ids: stop strings at their end, and placeholders of images.

A prompt has one placeholder per image where it is written or sent, and one per image token where it runs. Placeholders
are the first tokens of their id in a sequence, because a model may also sample that id.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Finds the stop strings of one request in a growing output, also across tokens and interruptions.

    Matching is on decoded text with special tokens: a stop string of n bytes that ends now lies within the last n
    tokens. A client that continues an interrupted output drops the tokens that may begin a stop string, because a
    server looks at new output only.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # One more: a decoder may strip the first token's space.
        self._window = max(len(stop.encode()) for stop in stops) + 1

    def matched(self, output_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last token completed."""
        text = self._text(output_ids)
        return min((stop for stop in self._stops if stop in text), key=text.find, default=None)

    def num_settled(self, output_ids: Sequence[int]) -> int:
        """Return the number of tokens before those at the end that may begin a stop string."""
        beginnings = [stop[:length] for stop in self._stops for length in range(1, len(stop))]
        open_ends = ("\N{REPLACEMENT CHARACTER}", *beginnings)  # the first: in the middle of a character
        num_tokens = len(output_ids)
        while num_tokens and self._text(output_ids[:num_tokens]).endswith(open_ends):
            num_tokens -= 1
        return num_tokens

    def _text(self, output_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(output_ids[-self._window :], skip_special_tokens=False)


def image_token_id(tokenizer: Any) -> int:
    """Return the id of the placeholder in prompts."""
    token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
    if (token_id := tokenizer.get_vocab().get(token)) is None:
        raise ValueError(f"the tokenizer must have {token}, which stands for images: it has not. Use a vision model.")
    return int(token_id)


def expansion(ids: Sequence[int], num_tokens: Sequence[int], token_id: int) -> list[int]:
    """Return indices into `ids` that repeat the placeholder of image i `num_tokens[i]` times."""
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

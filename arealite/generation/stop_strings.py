"""Finds stop strings at the end of a growing output, also when they span tokens.

The match is on decoded text with special tokens spelled out. There every token adds at least one byte, so a stop
string that ends with the newest token lies within as many tokens as it has bytes, and only those are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase


def stop_string_matcher(
    tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]
) -> Callable[[Sequence[int]], str | None]:
    """Return a function from output tokens to the stop string that the last token completed."""
    window = max(len(stop.encode()) for stop in stops) + 1  # one more: a decoder may strip the first token's space

    def matched_stop(output_ids: Sequence[int]) -> str | None:
        text = tokenizer.decode(output_ids[-window:], skip_special_tokens=False)
        return min((stop for stop in stops if stop in text), key=text.find, default=None)

    return matched_stop


def trim_stop_string(text: str, stop: str) -> str:
    """Cut the text before the first occurrence of the stop string."""
    return text.partition(stop)[0]

"""Finds stop strings at the end of a growing output, also when they span tokens or an interruption.

Matching is on decoded text with special tokens: a stop string of n bytes that ends now lies within the last n tokens. A
client that continues an interrupted output drops the tokens that may begin one, as a server looks at new output only.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        # One more: a decoder may strip the first token's space.
        self._window = max(len(stop.encode()) for stop in stops) + 1

    def matched(self, output_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last token completed."""
        text = self._text(output_ids)
        return min((stop for stop in self._stops if stop in text), key=text.find, default=None)

    def num_settled(self, output_ids: Sequence[int]) -> int:
        """Return how many tokens remain when those at the end that may begin a stop string are dropped."""
        beginnings = [stop[:length] for stop in self._stops for length in range(1, len(stop))]
        open_ends = ("\N{REPLACEMENT CHARACTER}", *beginnings)  # the first: in the middle of a character
        num_tokens = len(output_ids)
        while num_tokens and self._text(output_ids[:num_tokens]).endswith(open_ends):
            num_tokens -= 1
        return num_tokens

    def _text(self, output_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(output_ids[-self._window :], skip_special_tokens=False)

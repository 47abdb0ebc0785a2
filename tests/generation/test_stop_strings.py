from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TEXT_VOCAB, tokenizer

from arealite.generation.stop_strings import stop_string_matcher, trim_stop_string

TOKENIZER = tokenizer()
ID = {token: index for index, token in enumerate(TEXT_VOCAB)}


def ids(*tokens: str) -> list[int]:
    return [ID[token] for token in tokens]


@pytest.mark.parametrize(
    ("tokens", "stops", "matched"),
    [
        (("c", "an"), ["an"], "an"),
        (("b", "an", "a"), ["ana"], "ana"),
        (("ba", "n", "a"), ["ana"], "ana"),
        (("ba", "n"), ["ana"], None),
        (("c", "the"), ["he", "the"], "the"),
        (("c", "<eos>"), ["<eos>"], "<eos>"),
        (("x", "<eos>"), ["x"], "x"),
    ],
)
def test_the_last_token_completes_a_stop_string(tokens: tuple[str, ...], stops: list[str], matched: str | None) -> None:
    assert stop_string_matcher(TOKENIZER, stops)(ids(*tokens)) == matched


@given(
    tokens=st.lists(st.sampled_from(sorted(ID.values())), min_size=1, max_size=40),
    stops=st.lists(st.text("abnthei ", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_generation_stops_exactly_where_the_whole_text_first_contains_a_stop(
    tokens: list[int], stops: list[str]
) -> None:
    matcher = stop_string_matcher(TOKENIZER, stops)
    for end in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:end], skip_special_tokens=False)
        contained = any(stop in text for stop in stops)
        assert (matcher(tokens[:end]) is not None) == contained
        if contained:
            break


def test_trimming_keeps_what_precedes_the_stop() -> None:
    assert trim_stop_string("one two one", " two") == "one"

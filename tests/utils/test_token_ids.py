from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TEXT_VOCAB, tokenizer

from arealite.utils.token_ids import StopStrings, collapse, expansion

TOKENIZER = tokenizer()
PAD = 9
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
    assert StopStrings(TOKENIZER, stops).matched(ids(*tokens)) == matched


@given(
    tokens=st.lists(st.sampled_from(sorted(ID.values())), min_size=1, max_size=40),
    stops=st.lists(st.text("abnthei ", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_generation_stops_exactly_where_the_whole_text_first_contains_a_stop(
    tokens: list[int], stops: list[str]
) -> None:
    matcher = StopStrings(TOKENIZER, stops)
    for end in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:end], skip_special_tokens=False)
        contained = any(stop in text for stop in stops)
        assert (matcher.matched(tokens[:end]) is not None) == contained
        if contained:
            break


@given(
    tokens=st.lists(st.sampled_from(sorted(ID.values())), min_size=1, max_size=40),
    stops=st.lists(st.text("abnthei ", min_size=1, max_size=5), min_size=1, max_size=3),
    cut=st.integers(0, 40),
)
def test_an_interrupted_output_continues_to_the_same_stop(tokens: list[int], stops: list[str], cut: int) -> None:
    """Looking only at what comes after the settled tokens finds the stop of the uninterrupted output."""
    stop_strings = StopStrings(TOKENIZER, stops)

    def end_of(output: list[int]) -> int | None:
        return next((n for n in range(1, len(output) + 1) if stop_strings.matched(output[:n])), None)

    uninterrupted = end_of(tokens)
    if uninterrupted is not None and uninterrupted <= cut:
        return  # it had ended before the interruption
    settled = stop_strings.num_settled(tokens[:cut])
    continued = end_of(tokens[settled:])
    assert (None if continued is None else settled + continued) == uninterrupted


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 8), min_size=1, max_size=3), st.integers(1, 4)), max_size=3),
    st.lists(st.integers(7, 9), max_size=5),
)
def test_what_is_collapsed_is_expanded_again(shown: list[tuple[list[int], int]], sampled: list[int]) -> None:
    """Texts, each followed by an image of so many tokens; then tokens that may be the placeholder's own."""
    sampled = [1, *sampled]
    written = [token for text, _ in shown for token in [*text, PAD]] + sampled
    run = [token for text, length in shown for token in [*text, *[PAD] * length]] + sampled
    places = expansion(written, [length for _, length in shown], PAD)
    assert [written[place] for place in places] == run
    assert collapse(run, len(shown), PAD) == written


def test_an_image_without_a_placeholder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a prompt must have a placeholder for each image: got 1 for 2"):
        expansion([1, PAD, 2], [3, 4], PAD)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.utils.placeholders import collapse, expansion

PAD = 9


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

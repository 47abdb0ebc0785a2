"""The prompts before a cursor are those that the loader has yielded, whatever its settings."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from arealite.dataset.loader import PromptLoader
from arealite.utils.data_order import order_of_epoch, passed_prompts


@given(st.integers(1, 20), st.data(), st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 30))
def test_passed_prompts_are_those_yielded(size, data, seed, shuffle, drop_last, num_batches) -> None:
    batch_size = data.draw(st.integers(1, size))
    loader = PromptLoader([{}] * size, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    rows = [row for batch in itertools.islice(loader, num_batches) for row in batch]
    yielded = [(row["prompt_id"].epoch, row["prompt_id"].index) for row in rows]
    assert list(passed_prompts(loader.state_dict())) == yielded


def test_the_order_stays_what_it_was() -> None:
    """Runs that were interrupted before an upgrade of ours resume with the same prompts."""
    assert order_of_epoch(8, epoch=0, seed=1, shuffle=True) == [2, 5, 6, 0, 3, 7, 1, 4]
    assert order_of_epoch(8, epoch=1, seed=1, shuffle=True) == [0, 3, 5, 2, 4, 7, 6, 1]
    assert order_of_epoch(4, epoch=1, seed=1, shuffle=False) == [0, 1, 2, 3]

"""Which slot a prompt is found in, and which contents go when a slot is needed. A cache of tokens stands for keys."""

from __future__ import annotations

import pytest
from test_scheduler import WrittenTokens

from arealite.generation.slot_table import MIN_PREFIX_TOKENS, SlotTable

A, B, C = ((token,) * MIN_PREFIX_TOKENS for token in (1, 2, 3))


@pytest.fixture
def cache() -> WrittenTokens:
    return WrittenTokens(4)


@pytest.fixture
def table(cache: WrittenTokens) -> SlotTable:
    return SlotTable(cache, slots=4, context=600)


def run(table: SlotTable, cache: WrittenTokens, slot: int, tokens: tuple[int, ...]) -> int:
    """Let a sequence run in a slot, and return how many tokens it found there."""
    start = table.claim(slot, tokens)
    assert tuple(cache.tokens_SC[slot, :start]) == tokens[:start]
    cache.tokens_SC[slot, : len(tokens)] = tokens
    table.hold(slot, tokens)
    return start


def test_the_longest_prefix_is_found_but_never_the_whole_prompt(table: SlotTable, cache: WrittenTokens) -> None:
    for slot, tokens in enumerate((A, A + B, A + C)):
        run(table, cache, slot, tokens)
    assert table.find((*A, *B, 7)) == (1, 32)
    assert table.find((*A, *B[:5], 7)) == (1, 21)
    assert table.find(A + C) == (2, 31)
    assert table.find(A) == table.find(B) == (0, 0)


def test_a_conversation_that_continues_is_taken_over_and_copied_from_otherwise(
    table: SlotTable, cache: WrittenTokens
) -> None:
    assert run(table, cache, 0, A + B) == 0
    assert run(table, cache, 1, (*A, 7)) == 16  # beside the one that runs
    table.release(1, 1, (*A, 7), 17)
    table.release(0, 0, (*A, *B, 5), 33)
    assert run(table, cache, 0, (*A, 7, 8)) == 17  # which was in slot 1, and slot 0 moved there
    assert table.find((*A, *B, 5, 5)) == (1, 33)


def test_the_least_recently_used_goes_first(table: SlotTable, cache: WrittenTokens) -> None:
    for slot, tokens in enumerate((A, B, C, A + C)):
        run(table, cache, slot, tokens)
    for slot, tokens in reversed(list(enumerate((A, B, C, A + C)))):
        table.release(slot, slot, tokens, len(tokens))
    table.find((*C, 9))
    run(table, cache, 0, (8,) * 20)  # slot 0 held A, which was used later than A + C
    assert table.find((*A, *C, 9))[1] == 16
    assert [table.find((*one, 9))[1] for one in (A, B, C)] == [16] * 3
    run(table, cache, 1, (9,) * 20)
    assert [table.find((*one, 9))[1] for one in (A, B, C)] == [0, 16, 16]


def test_nothing_is_kept_in_a_slot_that_never_ran_a_sequence(table: SlotTable, cache: WrittenTokens) -> None:
    for tokens in (A, B):
        run(table, cache, 0, tokens)
        table.release(0, 0, tokens, len(tokens))
    assert [table.find((*one, 9))[1] for one in (A, B)] == [0, 16]
    assert not cache.tokens_SC[1:].any()


def test_nothing_is_found_after_other_weights_came_or_where_nothing_may_be_reused(cache: WrittenTokens) -> None:
    for reuses in (True, False):
        table = SlotTable(cache, slots=4, context=600, reuses=reuses)
        run(table, cache, 0, A + B)
        assert table.find(A + B)[1] == 31 * reuses
        table.clear()
        assert table.find(A + B) == (0, 0)

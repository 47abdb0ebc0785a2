from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.generation.request import FinishReason, GenerationRequest, SamplingParams, VersionSpan
from arealite.generation.scheduler import MIN_PREFIX_TOKENS, Scheduler, Sequence, SlotTable


class WrittenTokens:
    """A cache of the tokens themselves: 0 where nothing was written."""

    def __init__(self, slots: int) -> None:
        self.tokens_SC = np.zeros((slots + 1, 600), dtype=int)

    def copy(self, source: int, destinations: Iterable[int], length: int) -> None:
        for slot in destinations:
            self.tokens_SC[slot, :length] = self.tokens_SC[source, :length]

    def swap(self, slot_a: int, slot_b: int, length: int) -> None:
        self.tokens_SC[[slot_a, slot_b], :length] = self.tokens_SC[[slot_b, slot_a], :length]


def scheduler_of(slots: int, max_prefill_tokens: int = 100, *, reuses: bool = True) -> Scheduler:
    table = SlotTable(WrittenTokens(slots), slots=slots, context=600, reuses=reuses)
    return Scheduler(table, slots=slots, max_prefill_tokens=max_prefill_tokens)


def sequence(prompt: tuple[int, ...], max_new_tokens: int = 100, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    request = GenerationRequest("r", prompt, SamplingParams(max_new_tokens=max_new_tokens))
    return Sequence(request, stop_ids, len(prompt) + max_new_tokens, None, length=len(prompt))


def test_equal_prompts_are_computed_once_and_take_neighbouring_slots() -> None:
    scheduler = scheduler_of(4)
    sequences = [sequence(prompt) for prompt in ((1, 2), (3,), (1, 2), (4,), (5,))]
    scheduler.waiting.extend(sequences)
    prefills = scheduler.admit()
    assert [(p.tokens, p.first_slot, len(p.sequences)) for p in prefills] == [
        ((1, 2), 0, 2),
        ((3,), 2, 1),
        ((4,), 3, 1),
    ]
    assert scheduler.running == [sequences[0], sequences[2], sequences[1], sequences[3]]
    assert list(scheduler.waiting) == [sequences[4]]


def test_one_pass_is_bounded_and_a_longer_prompt_takes_several() -> None:
    scheduler = scheduler_of(8, 20)
    lengths = {1: 45, 2: 8, 3: 8, 4: 1}
    scheduler.waiting.extend(sequence((token,) * length) for token, length in lengths.items())
    passes = []
    while scheduler.waiting:
        prefills = scheduler.admit()
        for prefill in prefills:
            scheduler.prefilled(prefill)
        passes.append([(p.tokens[0], p.start, len(p.tokens), p.first_slot, len(p.sequences)) for p in prefills])
    assert passes == [
        [(1, 0, 20, 8, 0)],
        [(1, 20, 40, 8, 0)],
        [(1, 40, 45, 0, 1), (2, 0, 8, 1, 1)],
        [(3, 0, 8, 2, 1), (4, 0, 1, 3, 1)],
    ]


def test_one_pass_takes_any_prompt_whose_beginning_can_not_be_held() -> None:
    scheduler = scheduler_of(8, 5, reuses=False)
    scheduler.waiting.extend(sequence((1,) * length) for length in (9, 2, 3, 1))
    assert [[len(p.tokens) for p in scheduler.admit()] for _ in range(3)] == [[9], [2, 3], [1]]


def test_a_long_queue_waits_until_an_eighth_of_the_slots_is_free_and_a_short_one_does_not() -> None:
    scheduler = scheduler_of(16)
    scheduler.waiting.extend(sequence((i,)) for i in range(20))
    assert len(scheduler.admit()) == 16
    scheduler.release([3])
    assert scheduler.admit() == []
    scheduler.release([3])
    assert len(scheduler.admit()) == 2
    scheduler.drop(lambda one: one.request.input_ids[0] == 19)
    scheduler.release([0])
    assert len(scheduler.admit()) == 1 and not scheduler.waiting


def test_admission_that_began_fills_all_slots_in_spite_of_the_bound_of_a_pass() -> None:
    scheduler = scheduler_of(32, 4)
    scheduler.waiting.extend(sequence((i, i)) for i in range(80))
    assert [len(scheduler.admit()) for _ in range(17)] == [2] * 16 + [0]


def test_spans_and_ends() -> None:
    one = sequence((7, 7), max_new_tokens=4, stop_ids=frozenset({9}))
    assert one.append(5, -0.1, "0") is None
    assert one.append(5, -0.2, "1") is None
    assert one.append(5, -0.3, "1") is None
    assert one.append(6, -0.4, "3") == FinishReason("length")
    assert one.spans == [VersionSpan("0", 0, 1), VersionSpan("1", 1, 3), VersionSpan("3", 3, 4)]
    assert sequence((7,), stop_ids=frozenset({9})).append(9, 0.0, "0") == FinishReason("stop", 9)


@given(data=st.data())
def test_a_sequence_always_finds_its_own_cache(data: st.DataObject) -> None:
    """Through random admissions, ends, aborts, requeues and updates, of prompts that share beginnings, each slot holds
    what the table says, and each running sequence finds its own tokens."""
    slots = data.draw(st.integers(1, 6))
    cache = WrittenTokens(slots)
    table = SlotTable(cache, slots=slots, context=600)
    scheduler = Scheduler(table, slots=slots, max_prefill_tokens=data.draw(st.integers(20, 100)))
    alive: list[Sequence] = []
    said: list[tuple[int, ...]] = [(1,) * 20]
    for number in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["submit", "submit", "step", "step", "step", "drop", "requeue", "update"])):
            case "submit":
                beginning = data.draw(st.sampled_from(said))
                kept = data.draw(st.integers(1, len(beginning)))
                prompt = beginning[:kept] + (number + 2,) * data.draw(st.integers(1, 20))
                group = [sequence(prompt) for _ in range(data.draw(st.integers(1, 2)))]
                alive.extend(group)
                scheduler.waiting.extend(group)
                said.append(prompt)
            case "step":
                for prefill in scheduler.admit():
                    assert (
                        tuple(cache.tokens_SC[prefill.first_slot, : prefill.start]) == prefill.tokens[: prefill.start]
                    )
                    cache.tokens_SC[prefill.first_slot, : len(prefill.tokens)] = prefill.tokens
                    cache.copy(prefill.first_slot, prefill.slots[1:], len(prefill.tokens))
                    scheduler.prefilled(prefill)
                for slot, running in enumerate(scheduler.running):
                    if running.output_ids:
                        cache.tokens_SC[slot, running.length - 1] = running.output_ids[-1]
                    running.append(number + 100, 0.0, "0")
                ended = data.draw(st.sets(st.integers(0, max(len(scheduler.running) - 1, 0))))
                ended = {slot for slot in ended if slot < len(scheduler.running)}
                gone = [scheduler.running[slot] for slot in ended]
                said += [one.tokens for one in gone]
                scheduler.release(ended)
                alive = [one for one in alive if one not in gone]
            case "drop":
                chosen = [one for one in alive if data.draw(st.booleans())]
                gone = scheduler.drop(lambda one, chosen=chosen: one in chosen)
                assert len(gone) == len(chosen)
                alive = [one for one in alive if one not in gone]
            case "requeue":
                scheduler.requeue()
            case "update":
                scheduler.requeue()
                table.clear()
                cache.tokens_SC[:] = 0
        for slot, running in enumerate(scheduler.running):
            assert tuple(cache.tokens_SC[slot, : running.length - 1]) == running.tokens[:-1]
        for slot in range(slots + 1):
            length = table._lengths_S[slot]
            assert (cache.tokens_SC[slot, :length] == table._tokens_SC[slot, :length]).all()
        assert len(scheduler.running) <= slots
        assert {id(one) for one in (*scheduler.running, *scheduler.waiting)} == {id(one) for one in alive}


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

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arealite.generation.request import FinishReason, GenerationRequest, SamplingParams, VersionSpan
from arealite.generation.scheduler import Scheduler, Sequence


def sequence(prompt: tuple[int, ...], max_new_tokens: int = 100, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    request = GenerationRequest("r", prompt, SamplingParams(max_new_tokens=max_new_tokens))
    return Sequence(request, stop_ids, len(prompt) + max_new_tokens, None, length=len(prompt))


def test_equal_prompts_are_computed_once_and_take_neighbouring_slots() -> None:
    scheduler = Scheduler(slots=4, max_prefill_tokens=100, move=lambda *_: None)
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


def test_one_pass_is_bounded_but_a_longer_prompt_still_runs() -> None:
    scheduler = Scheduler(slots=8, max_prefill_tokens=5, move=lambda *_: None)
    scheduler.waiting.extend(sequence(prompt) for prompt in ((1,) * 9, (2, 2), (3, 3, 3), (4,)))
    assert [[len(p.tokens) for p in scheduler.admit()] for _ in range(3)] == [[9], [2, 3], [1]]


def test_a_long_queue_waits_until_an_eighth_of_the_slots_is_free_and_a_short_one_does_not() -> None:
    scheduler = Scheduler(slots=16, max_prefill_tokens=100, move=lambda *_: None)
    scheduler.waiting.extend(sequence((i,)) for i in range(20))
    assert len(scheduler.admit()) == 16
    scheduler.release([3])
    assert scheduler.admit() == []
    scheduler.release([3])
    assert len(scheduler.admit()) == 2
    scheduler.drop(lambda one: one.request.input_ids[0] == 19)
    scheduler.release([0])
    assert len(scheduler.admit()) == 1 and not scheduler.waiting


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
    """Simulate the cache as one owner per slot through random admissions, ends, aborts and requeues."""
    owners: dict[int, Sequence] = {}

    def move(source: int, destination: int, length: int) -> None:
        assert length == owners[source].length - 1
        owners[destination] = owners[source]

    slots = data.draw(st.integers(1, 6))
    scheduler = Scheduler(slots=slots, max_prefill_tokens=8, move=move)
    alive: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["submit", "step", "drop", "requeue"])):
            case "submit":
                alive.append(sequence((number % 3,) * data.draw(st.integers(1, 4))))
                scheduler.waiting.append(alive[-1])
            case "step":
                for prefill in scheduler.admit():
                    for offset, new in enumerate(prefill.sequences):
                        assert new.tokens == prefill.tokens
                        owners[prefill.first_slot + offset] = new
                for running in scheduler.running:
                    running.append(1, 0.0, "0")
                ended = data.draw(st.sets(st.integers(0, max(len(scheduler.running) - 1, 0))))
                ended = {slot for slot in ended if slot < len(scheduler.running)}
                gone = [scheduler.running[slot] for slot in ended]
                scheduler.release(ended)
                alive = [one for one in alive if one not in gone]
            case "drop":
                chosen = [one for one in alive if data.draw(st.booleans())]
                gone = scheduler.drop(lambda one, chosen=chosen: one in chosen)
                assert len(gone) == len(chosen)
                alive = [one for one in alive if one not in gone]
            case "requeue":
                scheduler.requeue()
        assert [owners[slot] for slot in range(len(scheduler.running))] == scheduler.running
        assert len(scheduler.running) <= slots
        assert {id(one) for one in (*scheduler.running, *scheduler.waiting)} == {id(one) for one in alive}

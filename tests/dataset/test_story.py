import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.dataset.story import StoryOptions, is_held_out, story_rows

GAINED = ("finds", "buys", "gets", "wins", "brings", "adds")
LOST = ("loses", "gives", "sells", "drops", "takes", "borrows")


def solve(question: str) -> int:
    """Solve a story from its words alone."""
    opening, *events = re.split(r"(?<=\.) ", question)
    total = int(re.search(r"\d+", opening)[0])
    for event in events[:-1]:
        verb = next(word for word in event.split() if word in GAINED + LOST)
        total += int(re.search(r"\d+", event)[0]) * (1 if verb in GAINED else -1)
    return total


@given(
    seed=st.integers(0, 10**6),
    steps=st.tuples(st.integers(1, 7), st.integers(1, 7)).map(sorted),
    share=st.floats(0, 1),
    split=st.sampled_from(["train", "test"]),
)
def test_every_answer_is_right_and_every_number_small(seed, steps, share, split) -> None:
    options = StoryOptions(train=40, test=40, steps=f"{steps[0]}-{steps[1]}", with_steps=share)
    for row in story_rows(options, split, seed=seed):
        *written, final = row["answer"].split("\n")
        assert final == f"#### {solve(row['question'])}"
        num_events = row["question"].count(".") - 1
        assert steps[0] <= num_events <= steps[1] and len(written) in (0, num_events)
        total = None
        for step in written:
            before, sign, change, after = re.fullmatch(r"\w+day: (\d+)([+-])(\d)=(\d+)", step).groups()
            assert total in (None, int(before))
            total = int(before) + (int(change) if sign == "+" else -int(change))
            assert int(after) == total and 0 <= total <= 18 and 2 <= int(change) <= 9


def test_rows_are_a_function_of_options_seed_and_split() -> None:
    options = StoryOptions(train=300, test=100)
    assert story_rows(options, "train", seed=1) == story_rows(options, "train", seed=1)
    assert story_rows(options, "train", seed=1) != story_rows(options, "train", seed=2)
    assert story_rows(options, "train", seed=1)[:50] == story_rows(StoryOptions(train=50), "train", seed=1)


def test_splits_never_meet_and_no_question_comes_twice() -> None:
    train = [row["question"] for seed in (1, 2) for row in story_rows(StoryOptions(train=2000), "train", seed=seed)]
    test = [row["question"] for row in story_rows(StoryOptions(test=512), "test", seed=3)]
    assert not set(train) & set(test) and len(set(test)) == 512
    assert all(map(is_held_out, test)) and not any(map(is_held_out, train))


def test_the_share_of_written_answers_is_as_asked() -> None:
    rows = story_rows(StoryOptions(train=4000, with_steps=0.4), "train", seed=1)
    share = sum("\n" in row["answer"] for row in rows) / len(rows)
    assert abs(share - 0.4) < 0.03
    assert not any("\n" in row["answer"] for row in story_rows(StoryOptions(train=50, with_steps=0.0), "train", seed=1))


def test_options_come_from_a_query() -> None:
    options = StoryOptions.from_query("train=10&steps=3-4&with_steps=0.5")
    assert options == StoryOptions(train=10, steps="3-4", with_steps=0.5)
    assert options.steps_range == (3, 4) and StoryOptions(steps="2").steps_range == (2, 2)
    assert StoryOptions.from_query("") == StoryOptions()


@pytest.mark.parametrize(
    "query",
    ["rows=3", "train=many", "train=0", "test=-1", "steps=x", "steps=0", "steps=5-3", "steps=3-9", "with_steps=2"],
)
def test_bad_options_name_themselves(query: str) -> None:
    with pytest.raises(ValueError, match=query.partition("=")[0]):
        StoryOptions.from_query(query)


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="train or test"):
        story_rows(StoryOptions(), "valid", seed=1)

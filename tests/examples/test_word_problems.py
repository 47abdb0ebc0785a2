import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_quickstart import curriculum, is_held_out, pairs, rows

GAINED = ("finds", "buys", "gets", "wins", "brings", "adds")
LOST = ("loses", "gives", "sells", "drops", "takes", "borrows")


def solve(question: str) -> int:
    """Solve a problem from its words alone."""
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
    for row in rows(split, seed=seed, train=40, test=40, steps=f"{steps[0]}-{steps[1]}", with_steps=share):
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
    assert rows("train", seed=1, train=300) == rows("train", seed=1, train=300, test=100)
    assert rows("train", seed=1, train=300) != rows("train", seed=2, train=300)
    assert rows("train", seed=1, train=300)[:50] == rows("train", seed=1, train=50)
    text = json.dumps([rows(split, seed=1, train=300, test=100) for split in ("train", "test")])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0d86c9a45ab61f47", (
        "published numbers hold for these problems"
    )


def test_a_curriculum_has_the_same_questions_and_begins_with_answers_that_write_the_steps() -> None:
    mixed, ordered = rows("train", seed=1, train=300), curriculum("train", seed=1, train=300, written=200)
    assert [row["question"] for row in ordered] == [row["question"] for row in mixed]
    assert all("\n" in row["answer"] for row in ordered[:200]) and ordered[200:] == mixed[200:]
    assert curriculum("test", seed=1, test=100, written=200) == rows("test", seed=1, test=100)


def test_splits_never_meet_and_no_question_comes_twice() -> None:
    train = [row["question"] for seed in (1, 2) for row in rows("train", seed=seed, train=2000)]
    test = [row["question"] for row in rows("test", seed=3, test=512)]
    assert not set(train) & set(test) and len(set(test)) == 512
    assert all(map(is_held_out, test)) and not any(map(is_held_out, train))


def test_the_share_of_written_answers_is_as_asked() -> None:
    found = rows("train", seed=1, train=4000, with_steps=0.4)
    share = sum("\n" in row["answer"] for row in found) / len(found)
    assert abs(share - 0.4) < 0.03
    assert not any("\n" in row["answer"] for row in rows("train", seed=1, train=50, with_steps=0))


def test_pairs_prefer_written_steps_to_the_bare_result() -> None:
    for row in pairs("test", seed=1, test="20", steps="2"):
        *written, final = row["chosen"].split("\n")
        assert len(written) == 2 and row["rejected"] == final == f"#### {solve(row['prompt'])}"


@pytest.mark.parametrize(
    "option",
    [
        "train=many",
        "train=0",
        "test=-1",
        "steps=x",
        "steps=0",
        "steps=5-3",
        "steps=3-9",
        "with_steps=2",
        "with_steps=x",
    ],
)
def test_bad_options_name_themselves(option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(ValueError, match=f"option {name} "):
        rows("train", seed=1, **{name: value})


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="train or test"):
        rows("valid", seed=1)

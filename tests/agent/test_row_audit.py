"""Every way in which a row can differ from what was sampled is found."""

import copy

import pytest
from testing_agents import Talk, user
from testing_chat_templates import real_tokenizer
from testing_row_audit import audit_turns, unpadded


@pytest.fixture(scope="module")
def talk():
    """Three turns in a row, another sample of the second, and a sub-agent, on a template that rewrites history."""
    talk = Talk(real_tokenizer("Qwen3"), history="template")
    first = talk.ask([user("One?")], "1 it is.")
    second = talk.ask([*first.conversation, user("Two?")], "2 it is.")
    talk.ask([*first.conversation, user("Two?")], "Two it is.")
    talk.ask([*second.conversation, user("Three?")], "3 it is.")
    talk.ask([user("Sum up.")], "6 in all.")
    return talk


@pytest.fixture
def rows(talk):
    return list(unpadded(talk.run.rows(1.0, {})))


def audited(talk, rows):
    return audit_turns(rows, [turn.response for turn in talk.run.turns])


@pytest.mark.parametrize(
    ("key", "by", "told"),
    [
        ("input_ids", 1, "is trained on in 0 rows"),
        ("loss_mask", -1, "is trained on in 0 rows"),
        ("logprobs", 1e-4, "has other logprobs"),
        ("versions", 1, "has other versions"),
    ],
)
def test_one_value_of_one_token_is_enough(talk, rows, key, by, told) -> None:
    for place, row in enumerate(rows):
        changed = copy.deepcopy(rows)
        changed[place][key][row["loss_mask"].index(1) + 2] += by
        audit = audited(talk, changed)
        assert audit.num_equal == 4 and not audit.is_clean
        assert told in audit.problems[-1]


def test_a_row_twice_and_a_row_less(talk, rows) -> None:
    assert "is trained on in 2 rows" in audited(talk, [*rows, rows[2]]).problems[0]
    assert audited(talk, rows[1:]).num_equal == 4


def test_equal_responses_need_a_row_each(talk, rows) -> None:
    responses = [turn.response for turn in talk.run.turns]
    doubled = audit_turns([*rows, *rows], [*responses, *responses])
    assert doubled.is_clean and doubled.num_equal == 10
    assert audit_turns(rows, [*responses, *responses]).num_equal == 5

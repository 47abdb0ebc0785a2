"""The tree of turns and its rows, worked by hand."""

import pytest

from arealite.agent.turns import Run, Turn
from arealite.api.errors import AgentError
from arealite.api.io_struct import ModelResponse


def turn(name: str, parent: Turn | None, given: list[int], sampled: list[int], **more) -> Turn:
    """A turn whose prompt is its parent's tokens and what was given then."""
    prompt = (parent.ids if parent else []) + given
    logprobs = [-token / 10 for token in sampled]
    response = ModelResponse(prompt, sampled, logprobs, [len(prompt)] * len(sampled), "stop", "here:1")
    asked = [*(parent.conversation if parent else []), {"role": "user", "content": f"before {name}"}]
    return Turn(name, parent, response, "", "", asked, {"role": "assistant", "content": name}, **more)


def run_of(*turns: Turn) -> Run:
    run = Run()
    for one in turns:
        run.add(one)
    return run


def test_a_chain_is_one_row() -> None:
    a = turn("a", None, [1, 2], [3])
    b = turn("b", a, [4], [5, 6])
    row = run_of(a, b).rows(2.0, {}, sample_index=3)
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert row["loss_mask"].tolist() == [[0, 0, 1, 0, 1, 1]]
    assert row["versions"].tolist() == [[-1, -1, 2, -1, 4, 4]]
    assert row["logprobs"][0, [2, 4, 5]].tolist() == pytest.approx([-0.3, -0.5, -0.6])
    assert row["rewards"].tolist() == [2.0] and row["sample_index"].tolist() == [3]
    assert row["turn_rewards"].tolist() == [[0.0] * 5 + [2.0]], "there whatever agents return: columns must be the same"


def test_a_run_may_be_long() -> None:
    turns = [turn("0", None, [1], [2])]
    for number in range(1, 1500):
        turns.append(turn(str(number), turns[-1], [1], [2]))
        turns[-1].messages = turns[-1].messages[-1:]  # only the ids matter here
    assert run_of(*turns).rows(1.0, {}, turn_discount=0.5)["loss_mask"].sum() == 1500


@pytest.fixture
def forked() -> list[Turn]:
    """Turn a, which c and b follow, and the sub-agent d."""
    a = turn("a", None, [1], [2])
    return [a, turn("c", a, [9], [10]), turn("b", a, [3], [4, 5]), turn("d", None, [7], [8])]


def test_each_sampled_token_is_trained_in_exactly_one_row(forked) -> None:
    rows = run_of(*forked).rows(1.0, {})
    assert rows["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 9, 10, 0], [7, 8, 0, 0, 0]]
    assert rows["loss_mask"].tolist() == [[0, 1, 0, 1, 1], [0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    assert rows["versions"][1].tolist()[:4] == [-1, -1, -1, 3] and rows["logprobs"][1, 1] == 0.0
    assert rows["rewards"].tolist() == [1.0, 1.0, 1.0]
    a, c, b, d = forked
    assert (run_of(d, a, b, c).rows(1.0, {}) == rows).all(), "in whatever order sub-agents came"


def test_turns_of_an_untrained_key_are_context(forked) -> None:
    a, _, b, d = forked
    b.is_trained = d.is_trained = False
    rows = run_of(a, b, d).rows(1.0, {})
    assert rows["loss_mask"].tolist() == [[0, 1]]
    a.is_trained = False
    with pytest.raises(AgentError, match="must ask the model and get an answer to train on: got 3 turns, none of"):
        run_of(a, b, d).rows(1.0, {})


def test_rewards_of_turns_are_discounted_along_the_path_and_not_in_order_of_creation(forked) -> None:
    """a is followed by b and c: its return is 1 + 0.5 * (0 + 4) / 2 = 2, its own share of a sum 2 - 2 = 0."""
    rows = run_of(*forked).rows(5.0, {"a": 1.0, "c": 4.0}, turn_discount=0.5)
    assert rows["turn_rewards"][0].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]
    assert rows["turn_rewards"][1].tolist() == [0.0, 0.0, 0.0, 4.0, 0.0]
    assert rows["rewards"].tolist() == [5.0] * 3


def test_a_reward_of_the_run_is_what_its_leaves_earn() -> None:
    """Returns 0.25, 0.5 and 1 of three turns: the sums from each of them on."""
    a = turn("a", None, [1], [2])
    b = turn("b", a, [3], [4])
    row = run_of(a, b, turn("c", b, [5], [6])).rows(1.0, {}, turn_discount=0.5)
    assert row["turn_rewards"].tolist() == [[0.0, -0.25, 0.0, -0.5, 0.0, 1.0]]


def test_a_judge_that_continues_a_conversation_changes_nothing() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", a, [3], [4])
    judges = [turn(name, one, [0], [9], is_trained=False) for name, one in (("j", a), ("k", b))]
    rows = run_of(a, b).rows(1.0, {}, turn_discount=0.5)
    assert (run_of(a, b, *judges).rows(1.0, {}, turn_discount=0.5) == rows).all()

"""Prompts that keep what was sampled, on the chat templates that models ship."""

import functools

import pytest
from testing_agents import Talk, user
from testing_chat_templates import FAMILIES, real_tokenizer

MODES = [(family, thinking) for family in FAMILIES for thinking in (False, True)]


@pytest.fixture(scope="module")
def tokenizers():
    return functools.cache(real_tokenizer)


@pytest.mark.parametrize(("family", "enable_thinking"), MODES)
def test_turns_in_tokens_of_the_models_own_choice_are_kept(tokenizers, family, enable_thinking) -> None:
    tokenizer = tokenizers(family)
    talk = Talk(tokenizer, enable_thinking=enable_thinking)
    messages = [user("How much?")]
    for number in range(5):
        turn = talk.ask(messages, f"It is {number}. ")
        assert turn.response.output_tokens[:-1] != tokenizer.encode(turn.raw_text, add_special_tokens=False)
        messages = [*turn.conversation, user(f"And more than {number}?")]
    for turn, prompt in zip(talk.run.turns, talk.prompts[1:]):
        assert prompt.parent is turn and prompt.branch is None
        assert prompt.ids[: len(turn.ids)] == turn.ids
        question = f"And more than {turn.id.removeprefix('turn-')}?"
        assert question in tokenizer.decode(prompt.ids[len(turn.ids) :])
    rows = talk.run.rows(1.0, {})
    assert rows["input_ids"].shape[0] == 1
    assert rows["loss_mask"].sum() == sum(turn.response.output_len for turn in talk.run.turns)

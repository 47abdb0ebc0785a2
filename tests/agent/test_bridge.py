"""Prompts that keep what was sampled, on the chat templates that models ship."""

import functools
import json

import pytest
from testing_agents import LOOK_UP, Talk, result, user
from testing_certificate import says
from testing_chat_templates import BEHAVIOURS, FAMILIES, real_tokenizer
from testing_row_audit import audit_turns, unpadded

from arealite.agent.bridge import Bridge
from arealite.agent.turns import Run, Turn
from arealite.agent.wire.base import tool_call
from arealite.api.io_struct import ModelResponse

MODES = [(family, thinking) for family in FAMILIES for thinking in (False, True)]
SOME = ("Qwen2.5", "Qwen3", "Qwen3.5", "Llama 3.1", "GLM-4.5", "gpt-oss")
"""What differs among the others; these run in `make test`, all in `make test-agents`."""


def marked(cases: list[tuple]) -> list:
    """Mark the cases of other families as slow."""
    return [pytest.param(*case, marks=[] if case[0] in SOME else pytest.mark.slow) for case in cases]


@pytest.fixture(scope="module")
def tokenizers():
    return functools.cache(real_tokenizer)


@pytest.mark.parametrize(("family", "enable_thinking"), marked(MODES))
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


def cycle(talk: Talk, question: str = "Is the cat there?") -> list[dict]:
    """Two calls of a tool and an answer, as the model of this template writes them."""
    messages = [user(question)]
    for does, follows in (("call", "Page 1."), ("call", "Page 2."), ("answer", "")):
        prompt = Bridge.prompt(talk.bridge, Run(), messages, [LOOK_UP])
        text, end = says(talk.bridge, prompt.text, does, [LOOK_UP])
        turn = talk.ask(messages, text, tools=[LOOK_UP], end=talk.bridge.chat.special.get(end))
        messages = turn.conversation
        if follows:
            assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["look_up"]
            messages = [*messages, result(follows, turn.message)]
    return messages


CALLING = [
    (family, thinking)
    for family, thinking in MODES
    if family.startswith(("Qwen", "Llama 3.", "LFM", "Nemotron", "GLM", "DeepSeek-R1-0", "gpt", "Gemma 4"))
] + [(family, False) for family in BEHAVIOURS]


@pytest.mark.parametrize(("family", "enable_thinking"), marked(CALLING))
def test_cycles_of_calls_and_results_are_one_row(tokenizers, family, enable_thinking) -> None:
    talk = Talk(tokenizers(family), enable_thinking=enable_thinking)
    messages = cycle(talk)
    talk.ask([*messages, user("And the dog?")], "No dog.", tools=[LOOK_UP])
    for turn, prompt, seen in zip(talk.run.turns, talk.prompts[1:], ("Page 1.", "Page 2.", "And the dog?")):
        assert prompt.parent is turn and prompt.ids[: len(turn.ids)] == turn.ids
        new = talk.tokenizer.decode(prompt.ids[len(turn.ids) :])
        assert seen in new and "cat" not in new
        ends = [turn.response.output_tokens[-1], talk.bridge.chat.closing]
        assert turn.response.stop_reason == "length" or prompt.ids[len(turn.ids)] not in ends, "one end is enough"
    assert not talk.run.branches and not talk.run.counts["malformed_calls"]
    audit = audit_turns(unpadded(talk.run.rows(1.0, {})), [turn.response for turn in talk.run.turns])
    assert audit.is_clean and audit.num_equal == 4


def test_the_template_policy_branches_where_the_template_rewrites(tokenizers) -> None:
    """As a stock server would see it; each sampled token is trained all the same, and once."""
    talk = Talk(tokenizers("Qwen3"), history="template")
    messages = cycle(talk)
    assert talk.run.branches == {"template": 2}
    assert [prompt.branch for prompt in talk.prompts] == [None, "template", "template"]
    assert all(prompt.parent is None for prompt in talk.prompts)
    for turn in talk.run.turns:
        written = talk.bridge.chat.render(turn.messages, [LOOK_UP])
        assert turn.prompt_text == written and talk.bridge.chat.encode(written) == turn.response.input_tokens
    assert len(messages) == 6
    rows = talk.run.rows(1.0, {})
    audit = audit_turns(unpadded(rows), [turn.response for turn in talk.run.turns])
    assert len(rows) == 3 and audit.is_clean


@pytest.fixture
def talk(tokenizers) -> Talk:
    return Talk(tokenizers("Qwen2.5"))


def test_clients_change_the_form_of_messages_and_not_their_meaning(talk) -> None:
    says = '<tool_call>\n{"name":"look_up","arguments":{"word":"cat","pages":3}}\n</tool_call>'
    first = talk.ask([{"role": "system", "content": "Be kind."}, user("Cat?")], says, tools=[LOOK_UP])
    system, asked = first.messages
    call = first.message["tool_calls"][0]
    swapped = {"name": "look_up", "arguments": {"pages": 3, "word": "cat"}}
    answer = {"role": "assistant", "content": None, "parsed": None, "tool_calls": [{"index": 0, "function": swapped}]}
    asked = {**asked, "content": [{"type": "text", "text": "Ca"}, {"type": "text", "text": "t?"}]}
    second = talk.ask(
        [{**system, "name": "x"}, asked, answer, result("Page 1.", first.message)], "Yes.", tools=[LOOK_UP]
    )
    assert second.parent is first and not talk.run.branches and len(call["id"]) == 9


def test_numbers_that_come_back_as_other_clients_write_them_are_the_same(talk) -> None:
    arguments = f'{{"word":"cat","pages":[3.0,{2**70}]}}'
    says = f'<tool_call>\n{{"name":"look_up","arguments":{arguments}}}\n</tool_call>'
    first = talk.ask([user("Cat?")], says, tools=[LOOK_UP])
    for pages, is_same in (([3.0, 2**70], True), ([3, float(2**70)], True), ([4, 2**70], False), ([True, 1], False)):
        function = {"name": "look_up", "arguments": {"word": "cat", "pages": pages}}
        answer = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        new = [user("Cat?"), answer, result("Page 1.", first.message)]
        assert (talk.bridge.prompt(talk.run, new, [LOOK_UP]).parent is first) == is_same


def test_thoughts_that_come_back_must_be_those_that_were_sampled(tokenizers) -> None:
    talk = Talk(tokenizers("Qwen3"), enable_thinking=True)
    first = talk.ask([user("One?")], "<think>\nHm.\n</think>\n\n1.")
    assert first.message == {"role": "assistant", "content": "1.", "reasoning_content": "Hm."}
    for thoughts, parent in ((None, first), ("Hm.", first), ("Oh.", None)):
        answer = {"role": "assistant", "content": "1.", "reasoning_content": thoughts}
        assert talk.bridge.prompt(talk.run, [user("One?"), answer, user("Two?")], None).parent is parent


def test_forks_and_edits_are_rows_of_their_own(talk) -> None:
    one = talk.ask([user("One?")], "1.")
    two = talk.ask([*one.conversation, user("Two?")], "2.")
    assert talk.ask([*one.conversation, user("And two?")], "II.").parent is one, "a fork"
    assert talk.ask([user("One?")], "I.").parent is None, "another sample"
    assert talk.ask([user("Say something.")], "Something.").parent is None, "a sub-agent"
    changed = [user("One?"), {"role": "assistant", "content": "It is 1."}, user("Two?")]
    dropped = [user("One?"), *two.conversation[2:], user("Three?")]
    later = [*one.conversation, user("2?"), two.message, user("Three?")]
    for messages, parent in ((changed, None), (dropped, None), (later, one)):
        turn = talk.ask(messages, "3.")
        assert turn.parent is parent and not talk.run.branches
        assert turn.prompt_text == talk.bridge.chat.render(messages)
    rows = talk.run.rows(1.0, {})
    assert audit_turns(unpadded(rows), [turn.response for turn in talk.run.turns]).num_equal == 8
    assert len(rows) == 7, "all but the first turn end a row"


def test_of_equal_answers_the_newest_is_continued_unless_ids_of_calls_tell(talk) -> None:
    twice = [talk.ask([user("One?")], "1.") for _ in range(2)]
    assert talk.ask([*twice[0].conversation, user("Two?")], "2.").parent is twice[1]
    assert talk.ask([*twice[0].conversation, user("Three?")], "3.", parent=twice[0]).parent is twice[0]
    says = '<tool_call>\n{"name":"look_up","arguments":{"word":"cat"%s}}\n</tool_call>'
    calls = [talk.ask([user("Cat?")], says % space, tools=[LOOK_UP]) for space in ("", " ")]
    assert calls[0].message["tool_calls"][0]["id"] != calls[1].message["tool_calls"][0]["id"]
    for turn in calls:
        found = talk.run.parent_of([*turn.conversation, result("Page 1.", turn.message)])
        assert found is turn


def test_other_tools_are_a_branch_whatever_the_policy(talk) -> None:
    first = talk.ask([user("One?")], "1.", tools=[LOOK_UP])
    for tools in ([], [{**LOOK_UP, "function": {**LOOK_UP["function"], "name": "find"}}]):
        turn = talk.ask([*first.conversation, user("Two?")], "2.", tools=tools)
        assert turn.parent is None and talk.prompts[-1].branch == "tools"
        assert talk.tokenizer.decode(turn.response.input_tokens) == talk.bridge.chat.render(
            turn.messages, tools or None
        )


def test_an_answer_that_was_cut_off_gets_the_templates_end(talk) -> None:
    """Also in the middle of a character, which is U+FFFD in the text that the client has and returns."""
    smile = talk.tokenizer.encode("🙂", add_special_tokens=False)
    assert len(smile) == 4
    prompt = talk.bridge.prompt(talk.run, [user("Smile!")], None)
    response = ModelResponse(prompt.ids, smile[:3], [-1.0] * 3, [0] * 3, "length", "here:1")
    raw_text, message = talk.bridge.read(response, prompt.text, None, talk.run.counts)
    assert message == {"role": "assistant", "content": "\ufffd"}
    turn = Turn("cut", None, response, prompt.text, raw_text, [user("Smile!")], message)
    talk.run.add(turn)
    after = talk.bridge.prompt(talk.run, [*turn.conversation, user("More!")], None)
    assert after.ids[: len(turn.ids)] == turn.ids and after.branch is None
    rest = talk.tokenizer.decode(after.ids[len(turn.ids) :])
    assert rest == "<|im_end|>\n<|im_start|>user\nMore!<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("family", "told"),
    [("Phi-3.5", "drops those of role 'tool'"), ("Gemma 3", "such as the chat template of the model takes: got Conv")],
)
def test_what_the_model_would_not_see_is_refused(tokenizers, family, told) -> None:
    talk = Talk(tokenizers(family))
    first = talk.ask([user("One?")], "Look.")
    with pytest.raises(ValueError, match=told):
        talk.ask([*first.conversation, {"role": "tool", "tool_call_id": "x", "content": "Page 1."}], "2.")


def test_calls_that_cannot_be_read_stay_text_and_are_counted(talk) -> None:
    broken = '<tool_call>\n{"name":"look_up","arguments":{"word"\n</tool_call>'
    turn = talk.ask([user("Cat?")], broken, tools=[LOOK_UP])
    assert turn.message == {"role": "assistant", "content": broken}
    assert talk.run.counts["malformed_calls"] == talk.run.counts["malformed_calls_json"] == 1
    assert talk.ask([*turn.conversation, user("Again.")], "No.", tools=[LOOK_UP]).parent is turn
    assert "tool_calls" not in talk.ask([user("Text?")], broken.replace('"word"', "}}")).message, "there are no tools"


@pytest.mark.parametrize(("family", "enable_thinking"), marked(CALLING))
def test_a_malformed_call_that_an_agent_sends_back_is_shown_to_the_model(tokenizers, family, enable_thinking) -> None:
    talk = Talk(tokenizers(family), enable_thinking=enable_thinking)
    for arguments in ('{"word": "cat"', '{"word": "two\nlines"}', '{"word": "say "hi""}', "cat"):
        called = {"role": "assistant", "content": "", "tool_calls": [tool_call("call00000", "look_up", arguments)]}
        prompt = talk.bridge.prompt(Run(), [user("Cat?"), called, result("No JSON.", called)], [LOOK_UP])
        written = arguments, repr(arguments)[1:-1], json.dumps(arguments)[1:-1], json.dumps(json.dumps(arguments))[2:-2]
        assert any(form in prompt.text for form in written) and "No JSON." in prompt.text

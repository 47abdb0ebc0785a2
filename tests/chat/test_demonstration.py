"""Conversations as demonstrations, with templates as models ship them and with the habits of some."""

import itertools
import re
from typing import Any

import pytest
from testing_chat_templates import FAMILIES, real_tokenizer, tokenizer_of
from testing_quickstart import train_tokenizer

from arealite.api.cli_args import GenerationHyperparameters
from arealite.chat.demonstration import demonstrations, stopping, turn_ends
from arealite.chat.template import prompt_tokens

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "\n2 "},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4½"},
]
THOUGHT = [CHAT[0], {**CHAT[1], "reasoning_content": "one"}, CHAT[2], {**CHAT[3], "reasoning_content": "two"}]
INLINE = [CHAT[0], {**CHAT[1], "content": "<think>\none\n</think>\n\n2"}, *CHAT[2:]]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "It is 2."},
]
WITHOUT_TEXT = {"SmolVLM"}  # its template takes lists of parts alone


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How much is 2 + 2?\n\n\nThe answer is 4."] * 20, vocab_size=512, max_position=512)


def shown(tokenizer: Any, row: dict[str, list[int]]) -> str:
    """Return a row as text, with [[ and ]] around what is taught."""
    runs = itertools.groupby(zip(row["input_ids"], row["loss_mask"], strict=True), key=lambda pair: pair[1])
    texts = [(mask, tokenizer.decode([token for token, _ in run])) for mask, run in runs]
    return "".join(f"[[{text}]]" if mask else text for mask, text in texts)


def taught(tokenizer: Any, row: dict[str, list[int]]) -> list[str]:
    return re.findall(r"\[\[(.*?)\]\]", shown(tokenizer, row), re.DOTALL)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITHOUT_TEXT))
def test_every_turn_is_taught_once_and_to_its_end(family: str) -> None:
    """The token that ends a turn is the one that the models of the family stop at."""
    tokenizer, end = real_tokenizer(family), FAMILIES[family][1]
    rows = demonstrations(tokenizer, CHAT)
    turns = [turn for row in reversed(rows) for turn in taught(tokenizer, row)]
    assert len(turns) == 2
    for turn, message in zip(turns, CHAT[1::2], strict=True):
        before, _, after = turn.partition(message["content"].strip())
        assert after.strip().endswith(end) and "+" not in before and len(before) < 30, turn
        assert turn.count(end) == 1 and "1+1?" not in turn and "2+2?" not in turn
    assert (
        shown(tokenizer, rows[0])
        .replace("[[", "")
        .replace("]]", "")
        .strip()
        .startswith(tokenizer.apply_chat_template(CHAT, tokenize=False, enable_thinking=False).strip())
    )
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer))[0] == end


QUESTION = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
REWRITTEN = {
    "Qwen3": (
        f"{QUESTION}\n2 <|im_end|>\n{AGAIN}[[<think>\ntwo\n</think>\n\n4½<|im_end|>]]\n",
        f"{QUESTION}[[<think>\none\n</think>\n\n2 <|im_end|>]]\n",
    ),
    "DeepSeek-R1 distillates": (
        "<s><｜User｜>1+1?<｜Assistant｜>\n2 <｜end▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜>"
        "<think>\n[[two\n</think>\n\n4½<｜end▁of▁sentence｜>]]",
        "<s><｜User｜>1+1?<｜Assistant｜><think>\n[[one\n</think>\n\n2 <｜end▁of▁sentence｜>]]",
    ),
    "GLM-4.5": (
        "[gMASK]<sop><|user|>\n1+1?<|assistant|>\n<think></think>\n2<|user|>\n2+2?<|assistant|>"
        "[[\n<think>two</think>\n4½<|user|>]]",
        "[gMASK]<sop><|user|>\n1+1?<|assistant|>[[\n<think>one</think>\n2<|user|>]]",
    ),
}


@pytest.mark.parametrize("family", REWRITTEN)
def test_a_turn_whose_thoughts_are_dropped_later_is_taught_as_it_was_sampled(family: str) -> None:
    tokenizer = real_tokenizer(family)
    assert tuple(shown(tokenizer, row) for row in demonstrations(tokenizer, THOUGHT)) == REWRITTEN[family]


def test_thoughts_in_the_content_are_thoughts() -> None:
    tokenizer = real_tokenizer("Qwen3")
    (_, first) = demonstrations(tokenizer, INLINE)
    assert taught(tokenizer, first) == ["<think>\none\n</think>\n\n2<|im_end|>"]


def test_turns_of_one_question_share_a_row_where_the_template_keeps_their_thoughts() -> None:
    tokenizer = real_tokenizer("Qwen3")
    messages = [TOOLS[0], {**TOOLS[1], "reasoning_content": "add"}, TOOLS[2], {**TOOLS[3], "reasoning_content": "so"}]
    (row,) = demonstrations(tokenizer, messages)
    assert taught(tokenizer, row) == [
        '<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\nIt is 2.<|im_end|>",
    ]


def test_a_turn_without_an_end_of_its_own_ends_with_the_token_of_the_next_message() -> None:
    tokenizer = real_tokenizer("GLM-4.5")
    (row,) = demonstrations(tokenizer, TOOLS)
    call, answer = taught(tokenizer, row)
    assert call.endswith("<arg_value>1</arg_value>\n</tool_call><|observation|>") and answer == "\nIt is 2.<|user|>"
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer)) == ["<|user|>", "<|observation|>"]


def test_an_end_after_the_last_turn_alone_is_learned_for_each(tokenizer) -> None:
    olmo = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' and loop.last %}<|end|>"
    olmo += "{% else %}{{ '\n' }}{% endif %}"
    tokenizer.chat_template = olmo + "{% endfor %}" + PROMPT
    last, first = demonstrations(tokenizer, [CHAT[0], {"role": "assistant", "content": "2"}, *CHAT[2:]])
    assert shown(tokenizer, last) == "<|user|>1+1?\n<|assistant|>2\n<|user|>2+2?\n<|assistant|>[[4½<|end|>]]"
    assert taught(tokenizer, first) == ["2<|end|>"]


def test_a_template_without_any_end_is_refused(tokenizer) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match=r"must end the assistant's turns with a token: got one after which"):
        demonstrations(tokenizer, CHAT)
    assert turn_ends(tokenizer) == []


def test_completions_stop_where_the_template_ends_an_answer() -> None:
    """A base model's own end is another one; where it is the template's, nothing is added."""
    own, gconfig = real_tokenizer("GLM-4.5"), GenerationHyperparameters(stop_token_ids=[1])
    user, observation = turn_ends(own)
    assert own.eos_token_id == user
    assert stopping(gconfig, own).stop_token_ids == [1, observation]
    own.eos_token = "<sop>"
    assert stopping(gconfig, own).stop_token_ids == [1, user, observation]
    assert stopping(gconfig, real_tokenizer("Qwen3")) is gconfig


@pytest.mark.parametrize("left_out", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("marked", [False, True])
def test_a_turn_that_says_so_is_left_out(tokenizer, left_out: dict[str, Any], marked: bool) -> None:
    turn = TURN.replace("{{ m.content }}<|end|>", "{% generation %}{{ m.content }}<|end|>{% endgeneration %}")
    own = f"{{% if m.role == 'assistant' %}}{turn}{{% else %}}{TURN}{{% endif %}}" if marked else TURN
    tokenizer.chat_template = LOOP.replace(TURN, own) + PROMPT
    (row,) = demonstrations(tokenizer, [CHAT[0], {**CHAT[1], **left_out}, CHAT[2], {**CHAT[3], "weight": 1, "id": 7}])
    assert taught(tokenizer, row) == ["4½<|end|>"]
    with pytest.raises(ValueError, match="must teach a turn of the assistant: got none, or all with weight 0"):
        demonstrations(tokenizer, [CHAT[0], {**CHAT[1], **left_out}])
    with pytest.raises(ValueError, match=r"weight of a message must be 0 or 1: got 0\.5 in message 2"):
        demonstrations(tokenizer, [CHAT[0], {**CHAT[1], "weight": 0.5}])


def test_a_conversation_may_begin_with_the_assistant(tokenizer) -> None:
    tokenizer.chat_template = LOOP + PROMPT
    (row,) = demonstrations(tokenizer, [{"role": "assistant", "content": "Hello"}, *CHAT[2:]])
    assert shown(tokenizer, row) == "<|assistant|>[[Hello<|end|>]]<|user|>2+2?<|end|><|assistant|>[[4½<|end|>]]"


def test_what_a_template_refuses_is_named_with_its_message() -> None:
    tokenizer = real_tokenizer("Gemma 3")
    told = r"must take the conversations of the data: got .* must alternate .* \(message 1 of 3\). Change their roles"
    with pytest.raises(ValueError, match=told):
        demonstrations(tokenizer, CHAT[1:])
    with pytest.raises(ValueError, match=r"\(message 3 of 4\)"):
        prompt_tokens(tokenizer, [[CHAT[0], CHAT[1], CHAT[1], CHAT[0]]])


def test_thoughts_that_the_template_never_writes_are_not_lost_silently() -> None:
    told = r"must write the thoughts of message 4: got one that drops them. Put them into its content"
    with pytest.raises(ValueError, match=told):
        demonstrations(real_tokenizer("Qwen2.5"), THOUGHT)


@pytest.mark.parametrize(
    ("template", "reason"), [("{{ raise_exception('no such role') }}", "no such role"), ("{{ 1 in 2 }}", ".*iterable")]
)
@pytest.mark.parametrize("marked", ["", "{% generation %}{% endgeneration %}"])
def test_a_conversation_that_the_template_refuses_is_refused_with_what_to_do(
    tokenizer, marked, template, reason
) -> None:
    tokenizer.chat_template = marked + template
    with pytest.raises(ValueError, match=f"must take the conversations of the data: got {reason}.* Change their"):
        demonstrations(tokenizer, CHAT)


def test_a_template_that_marks_what_the_model_writes_is_believed(tokenizer) -> None:
    marked = "{% generation %}" + TURN.partition("<|end|>")[0] + "<|end|>{% endgeneration %}"
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>" + (
        marked.replace("<|{{ m.role }}|>", "") + "{% else %}" + TURN + "{% endif %}{% endfor %}"
    )
    (row,) = demonstrations(tokenizer, CHAT)
    assert tokenizer.decode(row["input_ids"]).count("<|assistant|>") == 2
    assert taught(tokenizer, row) == ["\n2 <|end|>", "4½<|end|>"]


def test_a_row_begins_with_the_prompt_of_its_last_turn(tmp_path) -> None:
    tokenizer = tokenizer_of("qwen3", tmp_path)
    last, first = demonstrations(tokenizer, CHAT)
    for row, prompt in ((last, CHAT[:3]), (first, CHAT[:1])):
        (ids,) = prompt_tokens(tokenizer, [prompt])
        assert row["input_ids"][: len(ids)] == ids
        assert row["loss_mask"][: len(ids) + 1] == [0] * len(ids) + [1]

"""Answers as models write them, in every format that we read; and what transformers' parser would take for whole."""

import functools

import pytest
from testing_agents import LOOK_UP
from testing_chat_templates import real_tokenizer

from arealite.chat.answer import AnswerParser, MalformedCall, call_ids
from arealite.chat.template import ChatText


@functools.cache
def parser(family: str) -> AnswerParser:
    return AnswerParser(ChatText(real_tokenizer(family)))


def read(family: str, text: str, prompt: str = "", tools=(LOOK_UP,)):
    return parser(family).parse(text, prompt_text=prompt, tools=list(tools))


XML = "<tool_call>\n<function=look_up>\n%s</function>\n</tool_call>"
WORD, PAGES = "<parameter=word>\n%s\n</parameter>\n", "<parameter=pages>\n%s\n</parameter>\n"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CALLS = {
    "Qwen2.5": '<tool_call>\n{"name": "look_up", "arguments": {"word": "a cat", "pages": 3}}\n</tool_call>',
    "Qwen3.5": XML % (WORD % "a cat" + PAGES % 3),
    "Nemotron 3": XML % (WORD % "a cat" + PAGES % 3),
    "GLM-4.5": "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>a cat</arg_value>\n<arg_key>pages</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "gpt-oss": '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word":"a cat","pages":3}',
    "Mistral Nemo": '[TOOL_CALLS][{"name": "look_up", "arguments": {"word": "a cat", "pages": 3}}]',
    "DeepSeek-R1-0528": DEEPSEEK % 'function<｜tool▁sep｜>look_up\n```json\n{"word": "a cat", "pages": 3}\n```',
    "DeepSeek-V3.1": DEEPSEEK % 'look_up<｜tool▁sep｜>{"word": "a cat", "pages": 3}',
    "Gemma 4": '<|tool_call>call:look_up{word:<|"|>a cat<|"|>,pages:3}<tool_call|>',
    "LFM2": "<|tool_call_start|>[look_up(word='a cat', pages=3)]<|tool_call_end|>",
    "LFM2.5": '<|tool_call_start|>[look_up(word="a cat", pages=3)]<|tool_call_end|>',
    "Llama 3.1": '{"name": "look_up", "parameters": {"word": "a cat", "pages": 3}}',
    "Kimi-K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:7<|tool_call_argument_begin|>"
    '{"word": "a cat", "pages": 3}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("family", CALLS)
def test_calls(family) -> None:
    message = read(family, CALLS[family])
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": {"word": "a cat", "pages": 3}}
    assert message["content"] == "" and "reasoning_content" not in message
    assert ("id" in call) == (family == "Kimi-K2"), "where the model says it"
    assert read(family, CALLS[family], tools=())["content"].strip() == CALLS[family], "without tools it is text"


@pytest.mark.parametrize("family", ["Qwen2.5", "Qwen3.5", "GLM-4.5", "DeepSeek-V3.1", "Gemma 4"])
def test_several_calls_between_words(family) -> None:
    call = CALLS[family]
    message = read(family, f"First this: {call}\n{call} and so on.")
    assert len(message["tool_calls"]) == 2
    assert " ".join(message["content"].split()) == "First this: and so on."


@pytest.mark.parametrize(
    ("family", "prompt", "text", "thoughts", "content"),
    [
        ("Qwen3", "assistant\n", "<think>\nHm.\n</think>\n\n4 ", "Hm.", "4"),
        ("Qwen3", "assistant\n<think>\n\n</think>\n\n", " 4 ", None, " 4 "),
        ("Qwen3", "<think>, he said.assistant\n", "4", None, "4"),
        ("Qwen3.5", "assistant\n<think>\n", "Hm.\n</think>\n\n4", "Hm.", "4"),
        ("Qwen3.5", "assistant\n<think>\n", "Hm, hm", "Hm, hm", ""),
        ("Qwen3.5", "assistant\n<think>\n", "One.</think>4<think>Two.</think>5", "One.\nTwo.", "45"),
        (
            "gpt-oss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4",
            "Hm.",
            "4",
        ),
        ("Qwen2.5", "assistant\n", "<think>Hm.</think> 4", None, "<think>Hm.</think> 4"),
        ("gpt-oss", "<|start|>assistant", "four", None, "four"),
    ],
)
def test_thoughts(family, prompt, text, thoughts, content) -> None:
    message = read(family, text, prompt, tools=())
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, content)


@pytest.mark.parametrize(
    ("family", "text", "told"),
    [
        ("Qwen2.5", "<tool_call>[1, 2]</tool_call>", r"must have a name and an object of arguments: got \[1, 2\]"),
        ("Qwen2.5", '<tool_call>{"arguments": {}}</tool_call>', "must have a name"),
        ("Qwen2.5", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "must have a name and an object"),
        ("Qwen2.5", '<tool_call>{"name": "f", "argum', "must be such as the chat template shows"),
        ("Qwen2.5", '<tool_call>{"name": "f", "arguments": {}}', "must be complete"),
        ("Qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "must be such as"),
        ("Qwen3.5", XML % (WORD % "a </parameter> b"), "must consist of their arguments: got also 'b"),
        ("Qwen3.5", (XML % (WORD % "a" + PAGES % 3)).partition("</function>")[0], "must be complete"),
        ("Qwen3.5", (XML % (WORD % "a" + PAGES % 3))[:-60], "must consist of their arguments|must be complete"),
        ("Qwen3.5", XML % "word: a", "must consist of their arguments: got also 'word: a'"),
        ("GLM-4.5", "<tool_call>look_up\n<arg_key>word</arg_key>", "must consist of"),
        ("LFM2", "<|tool_call_start|>[look_up(word=f(x))]<|tool_call_end|>", "must consist of"),
        ("Llama 3.1", '{"name": "look_up", "parameters": {"word": "a"', "must be such as"),
        ("Mistral Nemo", "[TOOL_CALLS]look_up", "must be such as"),
        ("Gemma 4", "<|tool_call>call:look_up{word:", "must be such as"),
        ("Qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "must be JSON: got 'utf-8'"),
        ("Qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "must be JSON: got Out of range"),
        ("Qwen2.5", '<tool_call>{"name": "f", "arguments": {"a": ' + 3000 * "[", "must be such as"),
    ],
)
def test_what_the_parser_would_take_for_whole(family, text, told) -> None:
    with pytest.raises(MalformedCall, match=told):
        read(family, text)


QWEN = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (QWEN % '"one\ntwo"', "json"),
        (QWEN % '"say "hi" now"', "json"),
        (QWEN % '"one"}', "json"),
        ((QWEN % '"one').partition("</tool_call>")[0], "cut_off"),
        (QWEN.partition("</tool_call>")[0] % '"one"', "cut_off"),
        ('<tool_call>{"arguments": {}}</tool_call>', "arguments"),
        (XML % "word: a", "text"),
    ],
)
def test_a_malformed_call_says_of_which_kind_it_is(text: str, kind: str) -> None:
    with pytest.raises(MalformedCall) as told:
        read("Qwen3.5" if kind == "text" else "Qwen2.5", text)
    assert told.value.kind == kind


def test_arguments_have_the_types_of_the_schema() -> None:
    (call,) = read("Qwen3.5", XML % (WORD % "75001" + PAGES % "75001"))["tool_calls"]
    assert call["function"]["arguments"] == {"word": "75001", "pages": 75001}


def test_a_response_template_of_the_tokenizer_is_believed() -> None:
    tokenizer = real_tokenizer("Qwen2.5")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open_pattern": r"!(?P<name>\w+)",
                "close": "!",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    own = AnswerParser(ChatText(tokenizer))
    assert own.reads_calls and own.call_format is None
    message = own.parse('Look: !look_up{"word": "a"}!', prompt_text="<|im_start|>assistant\n", tools=[LOOK_UP])
    assert message["content"] == "Look:" and message["tool_calls"][0]["function"]["arguments"] == {"word": "a"}
    with pytest.raises(MalformedCall, match="must be complete"):
        own.parse('!look_up{"word": "a"}', prompt_text="<|im_start|>assistant\n", tools=[LOOK_UP])
    assert own.parse("!look_up{}!", prompt_text="", tools=None)["content"] == "!look_up{}!"


def test_a_template_without_calls_has_no_format() -> None:
    assert not parser("Llama 3").reads_calls
    assert read("Llama 3", CALLS["Llama 3.1"]) == {"role": "assistant", "content": CALLS["Llama 3.1"]}


def test_ids_of_calls_follow_from_the_tokens() -> None:
    ids = call_ids([1, 2, 3], 2)
    assert ids == call_ids([1, 2, 3], 2) and len({*ids, *call_ids([1, 23], 2)}) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids)

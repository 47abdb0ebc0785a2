"""What is found out about a chat template, and how text is continued in tokens that exist."""

import pytest
from testing_agents import user
from testing_chat_templates import real_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arealite.chat.template import ChatText

EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("family", "thinking", "opening", "closing"),
    [
        ("Qwen2.5", False, "", "<|im_end|>"),
        ("Qwen3", False, EMPTY, "<|im_end|>"),
        ("Qwen3", True, "", "<|im_end|>"),
        ("Qwen3.5", True, "<think>\n", "<|im_end|>"),
        ("GLM-4.5", True, "", None),
        ("gpt-oss", True, "", "<|end|>"),
        ("Command A", True, "", "<|END_OF_TURN_TOKEN|>"),
        ("DeepSeek-V3.1", True, "<think>", "<｜end▁of▁sentence｜>"),
    ],
)
def test_openings_and_ends(family, thinking, opening, closing) -> None:
    chat = ChatText(real_tokenizer(family), enable_thinking=thinking)
    assert (chat.opening, chat.special.get(chat.closing)) == (opening, closing)


ANSWER = {"role": "assistant", "content": "1."}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look_up", "arguments": {"word": "cat"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}


@pytest.mark.parametrize(
    ("family", "answer", "new", "glue"),
    [
        ("Qwen3", ANSWER, "user", "<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n" + EMPTY),
        (
            "Qwen3",
            CALLING,
            "tool",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nSo?\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            + EMPTY,
        ),
        ("GLM-4.5", ANSWER, "user", "<|user|>\nSo?/nothink<|assistant|>\n<think></think>"),
        (
            "GLM-4.5",
            CALLING,
            "tool",
            "<|observation|>\n<tool_response>\nSo?\n</tool_response><|assistant|>\n<think></think>",
        ),
        ("gpt-oss", ANSWER, "user", "<|end|><|start|>user<|message|>So?<|end|><|start|>assistant"),
        (
            "gpt-oss",
            CALLING,
            "tool",
            '<|call|><|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"So?"<|end|>'
            "<|start|>assistant",
        ),
        ("Gemma 4", CALLING, "tool", '<|tool_response>response:look_up{value:<|"|>So?<|"|>}<tool_response|>'),
        # One call a turn is what the template takes: the result follows as after words.
        (
            "Llama 3.1",
            CALLING,
            "tool",
            '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"So?"<|eot_id|><|start_header_id|>assistant'
            "<|end_header_id|>\n\n",
        ),
    ],
)
def test_glue(family, answer, new, glue) -> None:
    message = {"role": new, "content": "So?"} | (
        {"tool_call_id": CALL["id"], "name": "look_up"} if new == "tool" else {}
    )
    assert ChatText(real_tokenizer(family)).glue(answer, [message]) == glue


def test_no_template_and_no_answers() -> None:
    tokenizer = real_tokenizer("Qwen2.5")
    tokenizer.chat_template = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="must write the answers of the assistant: got one that drops them"):
        ChatText(tokenizer).glue(ANSWER, [user("So?")])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="agents must have a tokenizer with a chat template: got one without"):
        ChatText(tokenizer)


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer that puts a space before what begins a text, and takes it away when it decodes, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(["[INST] How much is it? [/INST] It is four."] * 9, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    return wrapped


@pytest.mark.parametrize("is_cut", [False, True])
def test_sentencepiece_puts_no_space_between(sentencepiece, is_cut) -> None:
    chat = ChatText(sentencepiece)
    before, answer = chat.encode(chat.render([user("How much?")])), chat.encode("<s> It is four")[1:]
    assert chat.decode(before, answer) == " It is four" != sentencepiece.decode(answer)
    end = None if is_cut else sentencepiece.eos_token_id
    rest = chat.glue(ANSWER, [user("How?")])
    assert rest == "</s>[INST] How? [/INST]"
    ids = [*before, *answer, *([] if is_cut else [end]), *chat.append(end, rest)]
    assert ids == chat.encode("<s>[INST] How much? [/INST] It is four</s>[INST] How? [/INST]")
    assert chat.append(None, "[INST]") == chat.encode("<s>[INST]")[1:] != chat.encode("[INST]")


def test_results_in_json_are_seen() -> None:
    chat = ChatText(real_tokenizer("gpt-oss"))
    message = {"role": "tool", "content": 'Say "½"\nnow. '}
    assert chat.hidden([message], 'x "Say \\"½\\"\\nnow." y') is None
    assert chat.hidden([message], 'x "Say \\"\\u00bd\\"\\nnow." y') is None
    assert chat.hidden([message], "x Say y") is message
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
    }
    assert chat.hidden([parts], "a <image> b") is None and chat.hidden([parts], "a <image>") is parts


def test_text_in_parts() -> None:
    """For templates that know only strings, and for those that know only parts."""
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "much?"}]
    for family in ("Qwen3", "SmolVLM", "Gemma 4"):
        chat = ChatText(real_tokenizer(family))
        assert "How much?" in chat.render([{"role": "user", "content": parts}])
        assert chat.render([user("How much?")]) == chat.render(
            [{"role": "user", "content": [{**parts[0], "text": "How much?"}]}]
        )

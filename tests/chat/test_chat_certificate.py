"""Templates with the defects of well-known ones, and what the certificate says of each."""

import jinja2
import pytest
from testing_chat_templates import STYLES, tokenizer_of
from testing_quickstart import END, train_tokenizer
from tokenizers import normalizers

from arealite.chat.certificate import PLAIN, certify
from arealite.chat.template import next_prompt, prompt_tokens

THINK = "answers with a <think> block"
EMPTY_LINE = "answers that begin with an empty line"
WHITESPACE = "answers that end with whitespace"
ALL_KINDS = {PLAIN, "empty answers", THINK, EMPTY_LINE, WHITESPACE, "a system message"}

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How much is 2 + 2?\n\n\nThe answer is 4."] * 20, vocab_size=512, max_position=512)


@pytest.fixture
def judge(tokenizer):
    """Return a function that certifies a template."""

    def certificate(template: str):
        tokenizer.chat_template = template
        return certify(tokenizer, end_ids={tokenizer.eos_token_id})

    return certificate


def test_a_template_that_only_appends(judge, tokenizer) -> None:
    certificate = judge(LOOP + PROMPT)
    assert not certificate.breaks and not certificate.refused and not certificate.garbled
    assert (certificate.after_answer, certificate.end_id) == (END, tokenizer.eos_token_id)


def test_a_newline_before_the_end_token_was_never_sampled(judge) -> None:
    certificate = judge(LOOP.replace("<|end|>", "\n<|end|>") + PROMPT)
    assert certificate.breaks.keys() == ALL_KINDS
    assert certificate.breaks[PLAIN].startswith("turn 1 changes when question 2 follows it: the model saw '<|end|>'...")
    assert "the template writes '\\n<|end|><|user|>" in certificate.breaks[PLAIN]


def test_earlier_thoughts_are_stripped_once_another_question_follows(judge) -> None:
    strips = (
        "{% set last = namespace(user=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text = m.content %}"
        "{% if m.role == 'assistant' and loop.index0 < last.user %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|{{ m.role }}|>{{ text }}<|end|>{% endfor %}"
    )
    breaks = judge(strips + PROMPT).breaks
    assert breaks.keys() == {THINK, EMPTY_LINE}
    assert breaks[THINK].startswith("turn 1 changes when question 2 follows it: the model saw '<think>\\n")
    assert "the template writes 'The answer is 4." in breaks[THINK]

    closed = PROMPT.replace("<|assistant|>", "<|assistant|>{% if not enable_thinking %}<think></think>{% endif %}")
    assert judge(strips + closed).breaks.keys() == ALL_KINDS, "the prompt's own empty thoughts are stripped as well"


def test_trimmed_answers(judge) -> None:
    breaks = judge(LOOP.replace("m.content", "m.content | trim") + PROMPT).breaks
    assert breaks.keys() == {EMPTY_LINE, WHITESPACE}
    assert r"saw ' \n<|end|>'" in breaks[WHITESPACE] and "writes '<|end|>" in breaks[WHITESPACE]


def test_a_system_prompt_of_the_template_itself(judge) -> None:
    default = "{% if messages[0].role != 'system' %}<|system|>You are a kind helper of Ada.<|end|>{% endif %}"
    assert not judge(default + LOOP + PROMPT).breaks


def test_a_role_that_is_refused(judge) -> None:
    refuses = "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    certificate = judge("{% for m in messages %}" + refuses + TURN + "{% endfor %}" + PROMPT)
    assert not certificate.breaks and certificate.refused == {"a system message": "System role not supported"}


def test_an_end_that_the_model_does_not_know(judge, tokenizer) -> None:
    certificate = judge(LOOP.replace("<|end|>", "<|user|>") + PROMPT)
    assert certificate.end_id is None and certificate.after_answer == "<|user|>"
    tokenizer.chat_template = LOOP.replace("<|end|>", "<|user|>") + PROMPT
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert certify(tokenizer, end_ids={tokenizer.eos_token_id, user}).end_id == user


def test_texts_that_do_not_survive_the_tokenizer(judge, tokenizer) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    try:
        garbled = judge(LOOP + PROMPT).garbled
    finally:
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
    assert garbled["The answer is 4."] == "the answer is 4."
    assert not judge(LOOP + PROMPT).garbled


def test_what_is_no_template(judge, tokenizer) -> None:
    with pytest.raises(jinja2.TemplateError):
        judge("{% for m in messages %}")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        certify(tokenizer, end_ids={1})


@pytest.fixture(scope="module")
def styled(tmp_path_factory):
    return {style: tokenizer_of(style, tmp_path_factory.mktemp(style)) for style in STYLES}


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_next_prompt_keeps_what_was_sampled_and_adds_what_the_template_writes(styled, style, is_cut) -> None:
    tokenizer = styled[style]
    asked = {"role": "user", "content": "How many?"}
    again = {"role": "user", "content": "Sure?"}
    (prompt,) = prompt_tokens(tokenizer, [[asked]])
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "Five"]  # as no encoding of it is
    sampled = [*prompt, *letters, *([] if is_cut else [tokenizer.eos_token_id])]
    found = next_prompt(tokenizer, sampled, [again])
    assert found[: len(sampled)] == sampled
    conversation = [asked, {"role": "assistant", "content": "Five"}, again]
    whole = tokenizer.decode(prompt_tokens(tokenizer, [conversation])[0])
    thought = "<think>\n\n</think>\n\n" if style == "qwen3" else ""  # which the template takes out of earlier turns
    assert tokenizer.decode(found) == whole.replace("Five", f"{thought}Five")

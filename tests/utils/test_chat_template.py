"""Templates with the defects of well-known ones, and what the certificate says of each."""

import jinja2
import pytest
from tokenizers import normalizers

from arealite.utils.chat_template import PLAIN, certify
from arealite.utils.tiny_model import END, train_tokenizer

THINK = "answers with a <think> block"
EMPTY_LINE = "answers that begin with an empty line"
WHITESPACE = "answers that end with whitespace"
TOOLS, TOOLS_THINK = "results of tools", "results of tools after a <think> block"
ALL_KINDS = {PLAIN, "empty answers", THINK, EMPTY_LINE, WHITESPACE, "a system message", TOOLS, TOOLS_THINK}

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["How much is 2 + 2?\n\n\nThe answer is 4."] * 20, vocab_size=512, max_position=512)


@pytest.fixture
def judge(tokenizer):
    """Return a function that certifies a template."""

    def certificate(template: str, **options):
        tokenizer.chat_template = template
        return certify(tokenizer, end_ids={tokenizer.eos_token_id}, **options)

    return certificate


def kinds(certificate) -> set[str]:
    return {broken.kind for broken in certificate.breaks}


def test_a_template_that_only_appends(judge, tokenizer) -> None:
    certificate = judge(LOOP + PROMPT)
    assert not certificate.breaks and not certificate.refused and not certificate.garbled
    assert certificate.num_compared == len(ALL_KINDS) * 3 * 3, "each kind in three turns, each turn in three ways"
    assert (certificate.after_answer, certificate.end_id) == (END, tokenizer.eos_token_id)
    assert certificate.preamble == "" and not certificate.depends_on_date


def test_a_newline_after_the_end_token_belongs_to_the_next_prompt(judge) -> None:
    certificate = judge(LOOP.replace("<|end|>", "<|end|>\n") + PROMPT)
    assert not certificate.breaks and certificate.after_answer == END + "\n"


def test_a_newline_before_the_end_token_was_never_sampled(judge) -> None:
    certificate = judge(LOOP.replace("<|end|>", "\n<|end|>") + PROMPT)
    assert kinds(certificate) == ALL_KINDS
    plain = certificate.breaks[0]
    assert (plain.turn, plain.when, plain.kept) == (1, "question 2 follows it", END)
    assert plain.rendered.startswith("\n" + END)


def test_the_marker_and_an_empty_line_of_the_answer_are_encoded_together(judge) -> None:
    template = LOOP.replace("|>{{ m.content", "|>\n{{ m.content") + PROMPT.replace("<|assistant|>", "<|assistant|>\n")
    certificate = judge(template)
    assert kinds(certificate) == {EMPTY_LINE}
    broken = certificate.breaks[0]
    assert broken.kept.startswith("\n|\n|\n|The| answer") and broken.rendered.startswith("\n\n|\n|The| answer")


def test_earlier_thoughts_are_stripped_once_another_question_follows(judge) -> None:
    strips = (
        "{% set last = namespace(user=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text = m.content %}"
        "{% if m.role == 'assistant' and loop.index0 < last.user %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|{{ m.role }}|>{{ text }}<|end|>{% endfor %}"
    )
    certificate = judge(strips + PROMPT)
    assert kinds(certificate) == {THINK, EMPTY_LINE}, "thoughts between tools stay"
    broken = certificate.breaks[0]
    assert (broken.turn, broken.when, broken.is_between_turns) == (1, "question 2 follows it", True)
    assert broken.kept.startswith("<think>") and broken.rendered.startswith("The answer is 4.")
    assert str(broken).startswith(f'with {THINK}, turn 1 changes when question 2 follows it: the model saw "<think>\\n')

    closed = PROMPT.replace("<|assistant|>", "<|assistant|>{% if not enable_thinking %}<think></think>{% endif %}")
    assert kinds(judge(strips + closed)) == ALL_KINDS, "the prompt's own empty thoughts are stripped as well"
    assert kinds(judge(strips + closed, enable_thinking=True)) == {THINK, EMPTY_LINE}


def test_a_rendering_that_ends_with_an_answer_may_differ(judge) -> None:
    """As Qwen3 does: the last answer gets empty thoughts, which are gone once a question follows."""
    adds = "{% if loop.last and m.role == 'assistant' %}<|assistant|><think></think>{{ m.content }}<|end|>{% else %}"
    certificate = judge(LOOP.replace(TURN, adds + TURN + "{% endif %}") + PROMPT)
    assert kinds(certificate) == ALL_KINDS and not any(broken.is_between_turns for broken in certificate.breaks)
    assert certificate.breaks[0].when == "it is rendered as a message"


def test_a_prompt_that_opens_the_thoughts(judge) -> None:
    certificate = judge(LOOP + PROMPT.replace("<|assistant|>", "<|assistant|><think>"))
    assert kinds(certificate) == ALL_KINDS and certificate.breaks[0].kept.startswith("<think>The answer")


def test_trimmed_answers(judge) -> None:
    certificate = judge(LOOP.replace("m.content", "m.content | trim") + PROMPT)
    assert kinds(certificate) == {EMPTY_LINE, WHITESPACE}
    broken = {b.kind: b for b in certificate.breaks}[WHITESPACE]
    assert broken.kept == " \n" + END and broken.rendered.startswith(END)


def test_a_system_prompt_of_the_template_itself(judge) -> None:
    default = "{% if messages[0].role != 'system' %}<|system|>You are a kind helper of Ada.<|end|>{% endif %}"
    certificate = judge(default + LOOP + PROMPT)
    assert not certificate.breaks and certificate.preamble == "You are a kind helper of Ada."


def test_a_system_prompt_that_moves_to_the_last_question(judge) -> None:
    moves = (
        "{% for m in messages if m.role != 'system' %}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
        + TURN
        + "{% endfor %}"
    )
    certificate = judge(moves + PROMPT)
    assert kinds(certificate) == {"a system message"}
    assert certificate.breaks[0].turn == 1


@pytest.mark.parametrize(
    ("condition", "told"),
    [("{{ raise_exception('System role not supported') }}", "System role not supported"), ("", "leaves out messages")],
)
def test_a_role_that_is_refused_or_left_out(judge, condition: str, told: str) -> None:
    message = f"{{% if m.role == 'system' %}}{condition}{{% else %}}{TURN}{{% endif %}}"
    guarded = f"{{% for m in messages %}}{message}{{% endfor %}}"
    certificate = judge(guarded + PROMPT)
    assert not certificate.breaks and certificate.refused.keys() == {"a system message"}
    assert told in certificate.refused["a system message"]


def test_an_end_that_the_model_does_not_know(judge, tokenizer) -> None:
    certificate = judge(LOOP.replace("<|end|>", "<|user|>") + PROMPT)
    assert certificate.end_id is None and certificate.after_answer == "<|user|>"
    tokenizer.chat_template = LOOP.replace("<|end|>", "<|user|>") + PROMPT
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert certify(tokenizer, end_ids={tokenizer.eos_token_id, user}).end_id == user


def test_the_date(judge) -> None:
    assert judge("{% set d = strftime_now('%Y') %}" + LOOP + PROMPT).depends_on_date


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

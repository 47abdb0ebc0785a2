"""The chat-template certificate: does a longer conversation begin with exactly the tokens of the shorter one?

A template that rewrites earlier turns (strips <think> blocks, trims) puts tokens that nobody sampled into a multi-turn
episode. A model may sample another encoding of the same text, so workflows keep the sampled ids in any case.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

_QUESTIONS = ("How much is 2 + 2?", "And how much is 3 + 3?", "Are you sure?")
_PLAIN = "The answer is 4."
_THOUGHT = f"<think>\nTwo and two make four.\n</think>\n\n{_PLAIN}"
_AROUND = 12  # tokens shown after a difference
PLAIN = "plain answers"
_KINDS = {  # what the system says, every answer
    PLAIN: ("", _PLAIN),
    "empty answers": ("", ""),
    "answers with a <think> block": ("", _THOUGHT),
    "answers that begin with an empty line": ("", f"\n\n{_PLAIN}"),
    "answers that end with whitespace": ("", f"{_PLAIN} \n"),
    "a system message": ("Answer in one sentence.", _PLAIN),
}
_HARD_TEXTS = ("Well , it is n't 4 .", "  for x in y:\n\t\tpass\n", "½ · 🙂 · 1234567")


@dataclass(frozen=True)
class Certificate:
    """How a template treats each kind of conversation."""

    breaks: Mapping[str, str]  # kinds of conversations that it rewrites, with the first place
    refused: Mapping[str, str]  # kinds of conversations that it can't render, with the reason
    after_answer: str  # text after an answer
    end_id: int | None  # first token of that text that ends generation, if any
    garbled: Mapping[str, str]  # texts that encoding and decoding changes, with the result


def certify(tokenizer: Any, *, end_ids: Collection[int]) -> Certificate:
    """Render growing conversations and compare their token ids; `end_ids` are those that end generation.

    Raises jinja2.TemplateError or ValueError if the template can't write plain questions and answers.
    """
    answered = [_message("user", _QUESTIONS[0]), _message("assistant", _PLAIN)]
    text = tokenizer.apply_chat_template(answered, tokenize=False, enable_thinking=False)
    tail = text.rpartition(_PLAIN)[2]
    end = next((token for token in _encode(tokenizer, tail) if token in end_ids), None)
    breaks: dict[str, str] = {}
    refused: dict[str, str] = {}
    for kind, (system, answer) in _KINDS.items():
        try:
            broken = _first_break(tokenizer, system, answer, [] if end is None else [end])
        except jinja2.TemplateError as error:
            if kind == PLAIN:
                raise
            refused[kind] = str(error)
        else:
            breaks |= {kind: broken} if broken else {}
    decoded = {text: tokenizer.decode(_encode(tokenizer, text)) for text in (_PLAIN, _THOUGHT, *_HARD_TEXTS)}
    garbled = {text: back for text, back in decoded.items() if back != text}
    return Certificate(breaks, refused, tail, end, garbled)


def _first_break(tokenizer: Any, system: str, answer: str, end: list[int]) -> str:
    """Grow one conversation; every prompt must begin with the prompt before it and the answer sampled there."""
    messages = [_message("system", system)] if system else []
    kept: list[int] = []
    for turn, question in enumerate(_QUESTIONS):
        messages.append(_message("user", question))
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, enable_thinking=False
        )
        if prompt[: len(kept)] != kept:
            saw, writes = _difference(tokenizer, kept, prompt)
            change = f"turn {turn} changes when question {turn + 1} follows it"
            return f"{change}: the model saw {saw!r}..., the template writes {writes!r}..."
        kept = [*prompt, *_encode(tokenizer, answer), *end]
        messages.append(_message("assistant", answer))
    return ""


def _difference(tokenizer: Any, kept: list[int], prompt: list[int]) -> tuple[str, str]:
    """Return both texts from the first token on that differs, in pieces if it is the same text in other tokens."""
    first = next((i for i, (old, new) in enumerate(zip(kept, prompt, strict=False)) if old != new), len(prompt))
    ours, theirs = kept[first : first + _AROUND], prompt[first : first + _AROUND]
    text, other = tokenizer.decode(ours), tokenizer.decode(theirs)
    if text.startswith(other) or other.startswith(text):
        text, other = ("|".join(tokenizer.decode([token]) for token in ids) for ids in (ours, theirs))
    return text, other


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}

"""Conversations as tokens, and the chat-template certificate: does a longer conversation begin with exactly the tokens
of the shorter one?

A template that rewrites earlier turns (strips <think> blocks, trims) puts tokens into a multi-turn episode that nobody
sampled. A model may sample another encoding of the same text, so workflows keep the sampled ids in any case.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from arealite.utils.chat_text import REFUSALS

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
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\b")  # with which a template says what the model writes
_NO_TEMPLATE = (
    "conversations with an assistant's turns or images must have a chat template: got a tokenizer without one. "
    "Add chat_template.jinja to tokenizer_path."
)
_HARD_TEXTS = ("Well , it is n't 4 .", "  for x in y:\n\t\tpass\n", "½ · 🙂 · 1234567")


@dataclass(frozen=True)
class Certificate:
    """How a template treats each kind of conversation."""

    breaks: Mapping[str, str]  # kinds of conversations that it rewrites, with the first place
    refused: Mapping[str, str]  # kinds of conversations that it can't render, with the reason
    after_answer: str  # text after an answer
    end_id: int | None  # first token of that text that ends generation, if any
    garbled: Mapping[str, str]  # texts that encoding and decoding changes, with the result


def prompt_tokens(
    tokenizer: Any, conversations: Sequence[list[dict[str, Any]]], *, enable_thinking: bool = False
) -> list[list[int]]:
    """Return what a model is asked for each conversation; without a chat template, its texts."""
    if tokenizer.chat_template is not None:
        rendered = [_render(tokenizer, one, asks=True, enable_thinking=enable_thinking) for one in conversations]
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    messages = [message for one in conversations for message in one]
    if any(one["role"] == "assistant" or not isinstance(one["content"], str) for one in messages):
        raise ValueError(_NO_TEMPLATE)
    return list(tokenizer(["\n\n".join(message["content"] for message in one) for one in conversations])["input_ids"])


def next_prompt(
    tokenizer: Any, tokens: list[int], messages: list[dict[str, Any]], *, enable_thinking: bool = False
) -> list[int]:
    """Return what a model is asked after `tokens`, a prompt and the answer that it sampled, and further `messages`.

    The tokens stay as they are; what follows them is what the template writes after an answer.
    """
    if tokenizer.chat_template is None:
        raise ValueError(_NO_TEMPLATE)
    dummy = [_message("user", _QUESTIONS[0]), _message("assistant", _PLAIN)]
    text = _render(tokenizer, [*dummy, *messages], asks=True, enable_thinking=enable_thinking)
    ids = _encode(tokenizer, text.partition(_PLAIN)[2])
    return [*tokens, *(ids[1:] if tokens[-1:] == ids[:1] else ids)]  # an answer that was cut off has no end token


def demonstration(tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return `input_ids` and `loss_mask` of a conversation: 1 on each turn of the assistant and the token that ends it.

    Turns are those that the template marks (`{% generation %}`), else what it adds to the conversation before them.
    """
    if tokenizer.chat_template is None:
        raise ValueError(_NO_TEMPLATE)
    if _MARKS_TURNS.search(tokenizer.chat_template):
        marked = _applied(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": list(marked["input_ids"]), "loss_mask": list(marked["assistant_masks"])}
    text = _render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    loss_mask = [0] * len(ids)
    for turn in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
        before, after = _render(tokenizer, messages[:turn], asks=True), _render(tokenizer, messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} must keep earlier turns as they are: got one that "
                f"rewrites message {turn + 1} of {len(messages)}. Mark the assistant's turns in it with "
                "{% generation %}, or use another chat_template.jinja."
            )
        tokens = [index for index, start in enumerate(starts) if len(before) <= start < len(after)]
        last = max((index for index in tokens if ids[index] in special), default=len(ids))  # line breaks may follow
        for index in tokens:
            loss_mask[index] = int(index <= last)
    return {"input_ids": ids, "loss_mask": loss_mask}


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], *, asks: bool = False, enable_thinking: bool = False
) -> str:
    return str(_applied(tokenizer, messages, enable_thinking, tokenize=False, add_generation_prompt=asks))


def _applied(tokenizer: Any, messages: list[dict[str, Any]], enable_thinking: bool = False, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking, **options)
    except REFUSALS as error:
        raise ValueError(
            f"the chat template must take the conversations of the data: got {error}. Change their roles, or "
            "train_dataset.system_prompt."
        ) from error


def certify(tokenizer: Any, *, end_ids: Collection[int]) -> Certificate:
    """Render growing conversations and compare their token ids; `end_ids` are those that end generation.

    Conversations with tools, and what agents make of all this, are certified by `arealite.agent.certificate`.

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

"""The chat-template certificate: does a longer conversation begin with exactly the tokens of the shorter one?

A multi-turn episode trains on the tokens that the model saw and sampled. If a template rewrites earlier turns (strips
their <think> blocks, trims them, moves the system prompt), a conversation that is rendered again holds tokens that
nobody sampled, and their logprobs mean nothing. Invariant: the judgement is about token ids, of the tokenizer's own
encoding of each answer. A model may also sample another encoding of the same text, which no template can give back:
that is why a workflow keeps the sampled ids even if its template is certified.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

_QUESTIONS = ("How much is 2 + 2?", "And how much is 3 + 3?", "Are you sure?")
_SYSTEM = "Answer in one sentence."
_PLAIN = "The answer is 4."
_THOUGHT = f"<think>\nTwo and two make four.\n</think>\n\n{_PLAIN}"
_AROUND = 12
"""Tokens shown after a difference."""


@dataclass(frozen=True)
class _Scenario:
    """A conversation in which every answer is the same, and every question after the first has the same role."""

    answer: str
    system: str = ""
    asks: str = "user"


_SCENARIOS = {
    "plain answers": _Scenario(_PLAIN),
    "empty answers": _Scenario(""),
    "answers with a <think> block": _Scenario(_THOUGHT),
    "answers that begin with an empty line": _Scenario(f"\n\n{_PLAIN}"),
    "answers that end with whitespace": _Scenario(f"{_PLAIN} \n"),
    "a system message": _Scenario(_PLAIN, system=_SYSTEM),
    "results of tools": _Scenario(_PLAIN, asks="tool"),
    "results of tools after a <think> block": _Scenario(_THOUGHT, asks="tool"),
}
PLAIN = next(iter(_SCENARIOS))
"""The kind without which a template is of no use."""
_HARD_TEXTS = ("Well , it is n't 4 .", "  for x in y:\n\t\tpass\n", "½ · 🙂 · 1234567")


@dataclass(frozen=True)
class Break:
    """A place where a rendering changes tokens of an earlier one."""

    kind: str
    turn: int
    """Of the answer that is rendered differently, counted from 1."""
    when: str
    is_between_turns: bool
    """Whether the next question's prompt has the change; otherwise only a rendering that ends there has it."""
    kept: str
    """The text from there on that the model saw and sampled."""
    rendered: str
    """What the template writes instead."""

    def __str__(self) -> str:
        kept, rendered = (json.dumps(text, ensure_ascii=False) for text in (self.kept, self.rendered))
        change = f"turn {self.turn} changes when {self.when}"
        return f"with {self.kind}, {change}: the model saw {kept}..., the template writes {rendered}..."


@dataclass(frozen=True)
class Certificate:
    """What a template does to conversations of all kinds."""

    breaks: tuple[Break, ...]
    """At most one of each kind; empty is append-only."""
    refused: Mapping[str, str]
    """Kinds of conversations that the template can't write, and why."""
    num_compared: int
    preamble: str
    """What the template writes before the first question if that is more than markers: a system prompt of its own."""
    after_answer: str
    """What the template writes after an answer."""
    end_id: int | None
    """The token in it that ends generation; None if there is none."""
    garbled: Mapping[str, str]
    """Texts that come back changed from encoding and decoding, and what comes back."""
    depends_on_date: bool


def certify(tokenizer: Any, *, end_ids: Collection[int], enable_thinking: bool = False) -> Certificate:
    """Render growing conversations and compare their token ids; `end_ids` are those that end generation.

    Raises jinja2.TemplateError for a template that is not one, and ValueError if there is none.
    """
    template = _Template(tokenizer, enable_thinking)
    source = str(tokenizer.get_chat_template())
    tail = template.text([_message("user", _QUESTIONS[0]), _message("assistant", _PLAIN)]).rpartition(_PLAIN)[2]
    end = next((token for token in template.encode(tail) if token in end_ids), None)
    breaks, refused = [], {}
    for kind, scenario in _SCENARIOS.items():
        try:
            broken = _worst_break(template, kind, scenario, end)
        except (jinja2.TemplateError, _LeftOut) as error:
            refused[kind] = str(error)
            continue
        if broken is not None:
            breaks.append(broken)
    texts = [*(scenario.answer for scenario in _SCENARIOS.values()), *_HARD_TEXTS]
    decoded = {text: tokenizer.decode(template.encode(text)) for text in texts}
    return Certificate(
        breaks=tuple(breaks),
        refused=refused,
        num_compared=template.num_compared,
        preamble=_preamble(template),
        after_answer=tail,
        end_id=end,
        garbled={text: back for text, back in decoded.items() if back != text},
        depends_on_date="strftime_now" in source,
    )


class _LeftOut(Exception):
    """A template renders a conversation and silently leaves a message out."""


class _Template:
    """A tokenizer's chat template with its options, which counts comparisons."""

    def __init__(self, tokenizer: Any, enable_thinking: bool) -> None:
        self.tokenizer = tokenizer
        self.num_compared = 0
        self._options = {"enable_thinking": enable_thinking}

    def ids(self, messages: list[dict[str, str]], *, generate: bool) -> list[int]:
        rendered: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=generate, return_dict=False, **self._options
        )
        return rendered

    def text(self, messages: list[dict[str, str]]) -> str:
        rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **self._options)
        return rendered

    def encode(self, text: str) -> list[int]:
        encoded: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    def difference(self, kept: list[int], rendered: list[int]) -> tuple[str, str] | None:
        """Return both texts from the first token on that differs; None if `rendered` begins with `kept`.

        The same text in other tokens is shown in pieces.
        """
        self.num_compared += 1
        if rendered[: len(kept)] == kept:
            return None
        pairs = enumerate(zip(kept, rendered, strict=False))
        first = next((i for i, (old, new) in pairs if old != new), len(rendered))
        ours, theirs = kept[first : first + _AROUND], rendered[first : first + _AROUND]
        texts = self.tokenizer.decode(ours), self.tokenizer.decode(theirs)
        is_same = texts[0].startswith(texts[1]) or texts[1].startswith(texts[0])
        return (self._pieces(ours), self._pieces(theirs)) if is_same else texts

    def _pieces(self, ids: list[int]) -> str:
        """Show where one token ends and the next begins."""
        return "|".join(self.tokenizer.decode([token]) for token in ids)


def _worst_break(template: _Template, kind: str, scenario: _Scenario, end: int | None) -> Break | None:
    """Grow one conversation; every rendering must begin with what was kept from the one before.

    Returns the first break between turns, else the first one.
    """
    messages = [_message("system", scenario.system)] if scenario.system else []
    kept: list[int] = []
    breaks = []
    for turn, question in enumerate(_QUESTIONS):
        messages.append(_message(scenario.asks if turn else "user", question))
        without, prompt = template.ids(messages, generate=False), template.ids(messages, generate=True)
        _check_complete(template, messages)
        answer = [*template.encode(scenario.answer), *([] if end is None else [end])]
        messages.append(_message("assistant", scenario.answer))
        answered = template.ids(messages, generate=False)
        comparisons = [
            (turn, f"question {turn + 1} follows it", kept, prompt),
            (turn + 1, "the generation prompt is added", without, prompt),
            (turn + 1, "it is rendered as a message", prompt + answer, answered),
        ]
        for index, (of_turn, when, earlier, later) in enumerate(comparisons):
            difference = template.difference(earlier, later)
            if difference is not None:
                breaks.append(Break(kind, of_turn, when, index == 0, *difference))
        kept = prompt + answer
    return next((found for found in breaks if found.is_between_turns), breaks[0] if breaks else None)


def _check_complete(template: _Template, messages: list[dict[str, str]]) -> None:
    """Refuse a rendering without the content of a system, user or tool message."""
    text = template.text(messages)
    for message in messages:
        if message["role"] != "assistant" and message["content"] not in text:
            raise _LeftOut(f"it leaves out messages of the role {message['role']}")


def _preamble(template: _Template) -> str:
    """Return what stands before the first question unless it is only markers such as `user`."""
    before = template.text([_message("user", _QUESTIONS[0])]).partition(_QUESTIONS[0])[0]
    words: str = template.tokenizer.decode(template.encode(before), skip_special_tokens=True)
    return words.strip() if len(words.split()) > 3 else ""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}

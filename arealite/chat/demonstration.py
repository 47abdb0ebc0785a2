"""Demonstrations as tokens: conversations in which every turn of the assistant is taught once, as it was sampled.

Templates differ in what they write of a turn that others follow (many drop its thoughts), and in what ends it: a token
of the turn, or the one that begins the next message.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters
from arealite.chat.template import NO_TEMPLATE, ChatText, Message, read_arguments, render, tokens_of

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\b")  # how a template marks what the model writes
_ANSWER = "The answer is 4."
_ASKED: Message = {"role": "user", "content": "How much is 2 + 2?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
_FOLLOWS: dict[bool, Message] = {  # an answer, and calls of tools
    False: {"role": "user", "content": "And how much is 3 + 3?"},
    True: {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"},
}
_OPENED = re.compile(r"([<\[])(\w+)([>\]])\s*$")  # a thought at the end of a prompt
_ANOTHER = "Mark the assistant's turns in it with {% generation %}, or use another chat_template.jinja."


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the tokens by which the chat template ends an answer, and an answer that calls tools if it ends otherwise.

    They may be the first token of the next message. Empty without a template, or if it ends answers with none.
    """
    if getattr(tokenizer, "chat_template", None) is None:  # a plan has no tokenizer
        return []
    try:
        chat = _chat(tokenizer, tokenizer.chat_template)
        if chat.end is not None:
            return [chat.end]
        ends = [_next_token(tokenizer, has_calls) for has_calls in (False, True)]
    except ValueError:  # it does not take the conversation
        return []
    return [tokenizer.convert_tokens_to_ids(end) for end in dict.fromkeys(filter(None, ends))]


def stopping(gconfig: GenerationHyperparameters, tokenizer: Any) -> GenerationHyperparameters:
    """Return a config whose completions stop where the template ends an answer, whatever the model's config says."""
    more = [end for end in turn_ends(tokenizer) if end not in (tokenizer.eos_token_id, *gconfig.stop_token_ids)]
    return gconfig.new(stop_token_ids=[*gconfig.stop_token_ids, *more]) if more else gconfig


def demonstrations(
    tokenizer: Any, messages: Sequence[Message], *, tools: Any = None, first: int = 0
) -> list[dict[str, list[int]]]:
    """Return `input_ids` and `loss_mask` of rows that teach the assistant's turns of a conversation from `first` on.

    `loss_mask` is 1 on what the model writes and on the token that ends it. A turn that the template rewrites when
    others follow ends a row of its own; the first row ends with the last turn. `weight: 0` and `train: false` of a
    message leave it out. A template's own marks (`{% generation %}`) are believed. Raises ValueError.
    """
    if tokenizer.chat_template is None:
        raise ValueError(NO_TEMPLATE)
    taught = [index for index, message in enumerate(messages) if index >= first and _is_taught(message, index)]
    if not taught:
        raise ValueError(
            "a demonstration must teach a turn of the assistant: got none, or all with weight 0. Drop the row."
        )
    messages = [_as_written(message) for message in messages]
    if _MARKS_TURNS.search(tokenizer.chat_template):
        return [_marked(tokenizer, messages, taught, tools)]
    rows: list[_Row] = []
    for turn in reversed(taught):
        text, start, end = _as_sampled(tokenizer, messages[: turn + 1], tools)
        row = next((row for row in rows if row.text.startswith(text[:end])), None)
        if row is None:
            rows.append(row := _Row(text))
        row.spans.append((start, end))
    return [row.encoded(tokenizer) for row in rows]


@dataclass
class _Row:
    """A conversation as text, and the places that are taught."""

    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)

    def encoded(self, tokenizer: Any) -> dict[str, list[int]]:
        encoded = tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True)
        places = [first for first, _ in encoded["offset_mapping"]]
        mask = [int(any(start <= place < end for start, end in self.spans)) for place in places]
        return {"input_ids": list(encoded["input_ids"]), "loss_mask": mask}


def _is_taught(message: Message, index: int) -> bool:
    """Tell whether a message is a turn to learn; `weight` is OpenAI's key, `train` that of others."""
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise ValueError(f"weight of a message must be 0 or 1: got {weight!r} in message {index + 1}. Round it.")
    return bool(message["role"] == "assistant" and weight != 0 and message.get("train") is not False)


def _as_written(message: Message) -> Message:
    """Return a message with the arguments of calls as objects, which OpenAI's format has as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or call)
        function["arguments"] = read_arguments(function.get("arguments"))
        calls.append({"type": "function", **call, "function": function})
    return {**message, "tool_calls": calls}


def _marked(tokenizer: Any, messages: Sequence[Message], taught: list[int], tools: Any) -> dict[str, list[int]]:
    marked = tokens_of(tokenizer, messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(marked["input_ids"]), list(marked["assistant_masks"])
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(taught) < len(turns):
        starts = [place for place, (before, one) in enumerate(zip([0, *mask], mask, strict=False)) if one > before]
        if len(starts) != len(turns):
            raise ValueError(
                f"a chat template must mark each turn of the assistant once where some are left out: got {len(starts)} "
                f"marks for {len(turns)} turns. Correct {{% generation %}} in it, or drop the row."
            )
        for turn, start, end in zip(turns, starts, [*starts[1:], len(mask)], strict=True):
            if turn not in taught:
                mask[start:end] = [0] * (end - start)
    return {"input_ids": ids, "loss_mask": mask}


def _as_sampled(tokenizer: Any, messages: list[Message], tools: Any) -> tuple[str, int, int]:
    """Return a conversation as it was when its last turn was sampled, and where that begins and ends."""
    prompt, sampled = _prompt_and_turn(tokenizer, messages, tools)
    chat = _chat(tokenizer, tokenizer.chat_template)
    special = "|".join(map(re.escape, chat.special.values()))
    ends = re.search(rf"(?:{special})(?:\s*(?:{special}))*\s*$", sampled)
    if chat.end is not None and ends is not None:
        own = chat.special[chat.end]
        first = ends[0].find(own)  # an end of the whole conversation may follow
        end = len(ends[0].rstrip()) if first < 0 else first + len(own)
        return prompt + sampled, len(prompt), len(prompt) + ends.start() + end
    token = _next_token(tokenizer, bool(messages[-1].get("tool_calls")))
    if token is None:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} must end the assistant's turns with a token: got one after "
            f"which {sampled[-20:]!r} is followed by none, so a model would learn no end. {_ANOTHER}"
        )
    text = prompt + sampled.rstrip() + token
    return text, len(prompt), len(text)


def _prompt_and_turn(tokenizer: Any, messages: list[Message], tools: Any) -> tuple[str, str]:
    """Return what the model saw before its last turn, and what it wrote, in the thinking mode that fits."""
    *before, turn = messages
    thoughts, content = _thoughts_and_content(turn)
    modes = []
    for is_thinking in (False, True):
        options: dict[str, Any] = {"tools": tools, "enable_thinking": is_thinking}
        after = render(tokenizer, messages, **options)
        opened = render(tokenizer, before, asks=True, **options) if before else after[: after.find(thoughts or content)]
        sampled = after[len(opened) :]
        if after.startswith(opened) and thoughts in sampled and content in sampled:
            return opened, sampled
        modes.append((opened, after, is_thinking))
    for opened, after, is_thinking in modes:  # its prompt opens a thought, which it does not write in turns
        opening = _chat(tokenizer, tokenizer.chat_template, is_thinking).opening
        prompt, tag = opened.removesuffix(opening), _OPENED.search(opening)
        sampled = after[len(prompt) :]
        if tag is None or not after.startswith(prompt) or content not in sampled:
            continue
        if thoughts in sampled:
            return prompt, sampled
        end = after[after.rfind(content) + len(content) :]
        return opened, f"{thoughts}\n{tag[1]}/{tag[2]}{tag[3]}\n\n{content}{end}"
    if thoughts:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} must write the thoughts of message {len(messages)}: got "
            "one that drops them. Put them into its content, or leave them out."
        )
    raise ValueError(
        f"the chat template of {tokenizer.name_or_path} must write a turn after the prompt that asks for it: got one "
        f"that changes message {len(messages)}. {_ANOTHER}"
    )


def _thoughts_and_content(turn: Message) -> tuple[str, str]:
    """Return both without the space around them; thoughts may have a key of their own or be in the content."""
    parts = turn.get("content") or ""
    content = parts if isinstance(parts, str) else "".join(part.get("text") or "" for part in parts)
    inner, closed, rest = content.rpartition("</think>")
    thoughts = turn.get("reasoning_content") or turn.get("thinking") or (inner.partition("<think>")[2] or inner)
    return str(thoughts).strip(), (rest if closed else content).strip()


@functools.lru_cache(maxsize=16)
def _chat(tokenizer: Any, chat_template: str, enable_thinking: bool = False) -> ChatText:
    return ChatText(tokenizer, enable_thinking=enable_thinking)


def _next_token(tokenizer: Any, has_calls: bool) -> str | None:
    """Return the special token that begins the message after an answer, or after calls of tools."""
    answer: Message = {"role": "assistant", "content": _ANSWER, **({"tool_calls": [_CALL]} if has_calls else {})}
    try:
        own = render(tokenizer, [_ASKED, answer]).rstrip()
        longer = render(tokenizer, [_ASKED, answer, _FOLLOWS[has_calls]])
    except ValueError:  # not every template takes tools
        return None
    chat = _chat(tokenizer, tokenizer.chat_template)
    token = chat.first_special(longer.removeprefix(own).lstrip()) if longer.startswith(own) else None
    return None if token is None else chat.special[token]

"""Chat templates: conversations as tokens and as text. Nothing here knows a model family.

`prompt_tokens` and `next_prompt` make the prompts that a model completes. `ChatText` finds what a template writes
around answers by rendering dummies. The text of a conversation so far is never rendered again: `ChatText.glue` is the
text between an answer and the next one, `ChatText.append` its token ids after those that were sampled.
"""

import contextlib
import copy
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jinja2

_ANSWER = "The answer is 4."
NO_TEMPLATE = (
    "conversations with an assistant's turns or images must have a chat template: got a tokenizer without one. "
    "Add chat_template.jinja to tokenizer_path."
)
SENTINEL = "zqsentinelqz"
_ASKED = {"role": "user", "content": "How much is 2 + 2?"}
_AGAIN = {"role": "user", "content": "And how much is 3 + 3?"}
REFUSALS = (jinja2.TemplateError, TypeError, KeyError, AttributeError)
"""Errors of a template that can't write a conversation."""

Message = dict[str, Any]


def prompt_tokens(
    tokenizer: Any, conversations: Sequence[list[dict[str, Any]]], *, enable_thinking: bool = False
) -> list[list[int]]:
    """Return the prompt of each conversation; without a chat template, the tokens of its texts."""
    if tokenizer.chat_template is not None:
        texts = [render(tokenizer, messages, asks=True, enable_thinking=enable_thinking) for messages in conversations]
        return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
    for message in itertools.chain(*conversations):
        if message["role"] == "assistant" or not isinstance(message["content"], str):
            raise ValueError(NO_TEMPLATE)
    texts = ["\n\n".join(message["content"] for message in messages) for messages in conversations]
    return list(tokenizer(texts)["input_ids"])


def next_prompt(
    tokenizer: Any, tokens: list[int], messages: list[dict[str, Any]], *, enable_thinking: bool = False
) -> list[int]:
    """Return the prompt after `tokens`, a prompt and the answer that was sampled, and further `messages`.

    The tokens stay as they are; the text that the template writes after an answer follows them.
    """
    if tokenizer.chat_template is None:
        raise ValueError(NO_TEMPLATE)
    dummy = [_ASKED, {"role": "assistant", "content": _ANSWER}]
    text = render(tokenizer, [*dummy, *messages], asks=True, enable_thinking=enable_thinking)
    ids = tokenizer(text.partition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    return [*tokens, *(ids[1:] if tokens[-1:] == ids[:1] else ids)]  # a truncated answer has no end token


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    asks: bool = False,
    enable_thinking: bool = False,
    tools: list[Any] | None = None,
) -> str:
    """Return a conversation as text; `asks` adds the start of the next answer. Raises ValueError naming the message."""
    options = {"tokenize": False, "add_generation_prompt": asks, "tools": tools}
    return str(tokens_of(tokenizer, messages, enable_thinking=enable_thinking, **options))


def tokens_of(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    """Apply the chat template; what it refuses raises ValueError with the first message that it does not take."""
    options = {"enable_thinking": False, **options}
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except (*REFUSALS, ValueError) as error:
        place = f"message {_refused(tokenizer, messages, options)} of {len(messages)}"
        raise ValueError(
            f"the chat template must take the conversations of the data: got {str(error).rstrip('.')} ({place}). "
            "Change their roles, or train_dataset.system_prompt."
        ) from error


def _refused(tokenizer: Any, messages: Sequence[Message], options: dict[str, Any]) -> int:
    """Return the length of the shortest conversation that is refused."""
    for length in range(1, len(messages)):
        try:
            tokenizer.apply_chat_template(messages[:length], **options)
        except (*REFUSALS, ValueError):
            return length
    return len(messages)


class ChatText:
    """A tokenizer's chat template, in one thinking mode.

    `closing` is the special token that ends an answer in the middle of a conversation (None: answers have no end of
    their own, the next message's first token ends generation), `end` that of an answer that nothing follows. `opening`
    is what the template writes at the start of the answer that it asks for but not in earlier ones, such as `<think>`.
    """

    def __init__(self, tokenizer: Any, *, enable_thinking: bool = False) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "agents must have a tokenizer with a chat template: got one without. Add chat_template.jinja to "
                "tokenizer_path."
            )
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        added = tokenizer.added_tokens_decoder.items()
        self.special = {token: str(text) for token, text in added if text.special}
        self._takes_text = self._takes_objects = True
        self._takes_text = SENTINEL in self._attempt([{"role": "user", "content": SENTINEL}])
        self._takes_objects = self._wants_objects()
        answered = [_ASKED, {"role": "assistant", "content": SENTINEL}]
        before, _, after = self.render([*answered, _AGAIN]).partition(SENTINEL)
        asked, own = self.render([_ASKED]), self.render(answered, asks=False).partition(SENTINEL)[2]
        shared = _common(before, asked)
        cut = shared.rfind("<") if shared.rfind("<") > shared.rfind(">") else len(shared)  # not within a tag
        self.opening = asked[cut:]
        self.end = self.closing = self.last_special(_common(own, after))
        if self.end is None and (end := self.first_special(own)) is not None:  # a last answer ends differently
            self.end, self.closing = end, self.first_special(after)

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, asks: bool = True) -> str:
        """Return a conversation as text; `asks` adds the start of the next answer.

        Raises ValueError, with the template's own reason, if the template refuses it.
        """
        written = [self._as_written(message) for message in messages]
        options = {"tools": tools, "add_generation_prompt": asks, "enable_thinking": self.enable_thinking}
        try:
            return str(self.tokenizer.apply_chat_template(written, tokenize=False, **options))
        except REFUSALS as error:
            if (wrapped := [*map(_with_objects, messages)]) != [*messages]:
                return self.render(wrapped, tools, asks=asks)
            raise ValueError(
                f"messages must be such as the chat template of the model takes: got {error}. Change their roles, "
                "their order or their content."
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return token ids of a text from its beginning on."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of ids that follow `before`: SentencePiece strips the space at the start of a text."""
        anchor = str(self.tokenizer.decode(list(before[-1:])))
        whole = str(self.tokenizer.decode([*before[-1:], *ids]))
        return whole[len(anchor) :] if whole.startswith(anchor) else str(self.tokenizer.decode(list(ids)))

    def append(self, end: int | None, rest: str, *, is_glue: bool = False) -> list[int] | None:
        """Return the ids that follow an answer's; None if the template writes something between the two.

        `end` is the special token that the model ended its answer with (None: it was cut off), `rest` the text from the
        end of the answer on, or glue. The model's own end stands for that of the template.
        """
        first = self.first_special(rest)
        anchor = self.special[first] if first is not None else self.tokenizer.eos_token or ""
        # After a special token, because SentencePiece puts a space before the start of a text.
        ids = self.encode(rest) if first is not None or not anchor else self.encode(anchor + rest)[1:]
        if end is None:
            return ids
        if first is not None and (first in (end, self.closing) or (is_glue and self.closing is not None)):
            return ids[1:]
        return ids if self.closing is None or is_glue else None

    def glue(self, answer: Message, new: Sequence[Message], tools: list[Any] | None = None) -> str:
        """Return what the template writes after an answer, its end included, if `new` messages follow.

        It comes from a short conversation with a dummy in place of the answer, which calls the same tools.
        Raises ValueError if the template refuses the messages.
        """
        refusal: ValueError | None = None
        for dummy in self._dummies(answer):
            try:
                text = self.render([_ASKED, dummy, *new], tools)
            except ValueError as error:
                refusal = refusal or error
                continue
            if SENTINEL in text:
                return self._from_end(text.rpartition(SENTINEL)[2], dummy, tools)
        raise refusal or ValueError(
            "the chat template must write the answers of the assistant: got one that drops them. Use another one."
        )

    def hidden(self, messages: Sequence[Message], text: str) -> Message | None:
        """Return the first message whose content is not in the text, as some templates drop tools' results."""
        for message in messages:
            for part in map(str.strip, texts_of(message) if message["role"] != "assistant" else ()):
                forms = part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]  # or within JSON
                if not any(form in text for form in forms):
                    return message
        return None

    def _from_end(self, after: str, dummy: Message, tools: list[Any] | None) -> str:
        """Cut off the rest of the dummy's call."""
        own = self.render([_ASKED, dummy], tools, asks=False).rpartition(SENTINEL)[2]
        shared = _common(own, after)
        if self.closing is None:
            return after[len(shared) :]
        end = self.last_special(shared)
        return after[
            shared.rfind(self.special[end]) if end is not None else max(after.find(self.special[self.closing]), 0) :
        ]

    def _dummies(self, answer: Message) -> list[Message]:
        """Return a dummy with the answer's calls, as results belong to calls, then a dummy without calls."""
        plain: Message = {"role": "assistant", "content": SENTINEL}
        if not (calls := answer.get("tool_calls")):
            return [plain]
        named = [{**call, "function": {**call["function"], "arguments": {SENTINEL: SENTINEL}}} for call in calls]
        return [{"role": "assistant", "content": "", "tool_calls": named}, plain]

    def last_special(self, text: str) -> int | None:
        """Return the last special token in a text."""
        return max(
            (token for token, written in self.special.items() if written in text),
            key=lambda token: text.rfind(self.special[token]),
            default=None,
        )

    def first_special(self, text: str) -> int | None:
        """Return the special token that a text begins with."""
        return max(
            (token for token, written in self.special.items() if text.startswith(written)),
            key=lambda token: len(self.special[token]),
            default=None,
        )

    def _wants_objects(self) -> bool:
        """Return whether the template takes the arguments of a call as an object, not as JSON."""
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {SENTINEL: SENTINEL}}}
        called: list[Message] = [_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if SENTINEL in self._attempt(called, asks=False):
            return True
        self._takes_objects = False
        return SENTINEL not in self._attempt(called, asks=False)

    def _attempt(self, messages: list[Message], *, asks: bool = True) -> str:
        try:
            return self.render(messages, asks=asks)
        except ValueError:
            return ""

    def _as_written(self, message: Message) -> Message:
        """Return a message in the form that the template takes: text or parts, arguments as an object or JSON."""
        content = message.get("content")
        others = [part.get("type") for part in content if "text" not in part] if isinstance(content, list) else []
        if others:  # a template would write the part itself, or a placeholder that nothing fills
            raise ValueError(f"messages must be text: got a part of type {others[0]!r}. Leave it out.")
        if not self._takes_text and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        elif self._takes_text and isinstance(content, list) and all(part.get("type") == "text" for part in content):
            message = {**message, "content": "".join(texts_of(message))}
        if self._takes_objects or not message.get("tool_calls"):
            return message
        calls = copy.deepcopy(message["tool_calls"])
        for function in (call["function"] for call in calls if not isinstance(call["function"]["arguments"], str)):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**message, "tool_calls": calls}


def read_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object; text that is no JSON object stays as it is."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(parsed := json.loads(arguments or "{}"), dict):
                return parsed
    return arguments


def _with_objects(message: Message) -> Message:
    """Return a message whose calls have objects as arguments; an agent may send back what is no JSON."""
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for function in (call["function"] for call in calls if isinstance(call["function"]["arguments"], str)):
        function["arguments"] = {"arguments": function["arguments"]}
    return {**message, "tool_calls": calls}


def _common(text_a: str, text_b: str) -> str:
    """Return the longest prefix of both texts."""
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text_a, text_b)))


def texts_of(message: Message) -> list[str]:
    """Return the texts that a message consists of, one for each of its parts that has one."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text") or "" for part in content]

"""Converts messages to token ids and back without re-encoding sampled tokens.

The prompt of a turn is the tokens of its parent turn plus new tokens, found by rendering the conversation as text with
each answer put back as sampled. If the template rewrites history, the policy `history` decides: `keep` appends what the
template writes after a dummy answer, so that the model sees its own tokens; `template` starts a branch with what the
template writes, as stock servers do.
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from arealite.agent.turns import Run, Turn, continues
from arealite.api.io_struct import ModelResponse
from arealite.chat.template import Message, texts_of
from arealite.workflow.conversation import ChatModel

_JOINER = "\u200b"  # zero-width space: breaks up the text of a control token


@dataclass(eq=False)
class NextPrompt:
    """The next prompt of the model."""

    ids: list[int]
    text: str
    """Text of the ids, with the template's end of an answer where the model sampled another."""
    parent: Turn | None
    """Turn whose tokens are a prefix of the ids."""
    branch: Literal["edited", "template", "tools"] | None
    """Reason why the ids do not continue the newest turn of the conversation."""
    counts: Counter[str] = field(default_factory=Counter, repr=False)
    """The counts of the run."""


class Bridge(ChatModel):
    """Builds prompts and parses answers for agents. Its methods take milliseconds; call them off the event loop."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: Literal["keep", "template"] = "keep",
        special_text: Literal["keep", "break"] = "keep",
        enable_thinking: bool = False,
    ) -> None:
        super().__init__(tokenizer, enable_thinking=enable_thinking)
        self.history = history
        self.special_text = special_text

    def prompt(
        self, run: Run, messages: list[Message], tools: list[Any] | None, *, parent: Turn | None = None
    ) -> NextPrompt:
        """Return the prompt of a whole conversation; `parent` is the turn that it continues, if known.

        Raises ValueError, with a reason for the client, if the template rejects the messages or drops one of them.
        """
        with self.lock:
            if parent is None or not continues(parent, messages):
                parent = run.parent_of(messages)
            is_edited = not run.is_known(messages) and run.is_edited(messages, parent)
            shown = self._plain(run, messages, parent)
            prompt = self._next(run, shown, tools or None, parent)
            prompt.branch = "edited" if is_edited else prompt.branch
            run.branches.update([prompt.branch] if prompt.branch else [])
            return prompt

    def parse(self, response: ModelResponse, prompt: NextPrompt, tools: list[Any] | None) -> tuple[str, Message]:
        """Return the sampled text and the message for the client."""
        with self.lock:
            return self.read(response, prompt.text, tools, prompt.counts)

    def _next(self, run: Run, messages: list[Message], tools: list[Any] | None, parent: Turn | None) -> NextPrompt:
        if parent is None:
            return self._fresh(run, messages, tools, None)
        new = messages[len(parent.conversation) :]
        for text in self._candidates(parent, messages, tools):
            if text.startswith(parent.text) and (prompt := self._continued(run, parent, text[len(parent.text) :], new)):
                return prompt
        if tools != (parent.tools or None):
            return self._fresh(run, messages, tools, "tools")
        if self.history == "template":
            return self._fresh(run, messages, tools, "template")
        text, ids = self.glued(parent.response, parent.message, new, tools)
        return NextPrompt(parent.ids + ids, parent.text + text, parent, None, run.counts)

    def _candidates(self, parent: Turn, messages: list[Message], tools: list[Any] | None) -> Iterator[str]:
        """Yield the rendered conversation, with each answer as sampled, then as parsed."""
        turns = {len(turn.messages): turn for turn in parent.path}

        def sampled(turn: Turn, opening: str) -> Message:
            return {"role": "assistant", "content": opening + turn.raw_text}

        openings = ["", self.chat.opening] if self.chat.opening else [""]
        forms = [{at: sampled(turn, opening) for at, turn in turns.items()} for opening in openings]
        for answers in [*forms, {at: turn.message for at, turn in turns.items()}]:
            with contextlib.suppress(ValueError):  # for example, a template may require a call before a tool's result
                yield self.chat.render([answers.get(at, message) for at, message in enumerate(messages)], tools)

    def _continued(self, run: Run, parent: Turn, rest: str, new: list[Message]) -> NextPrompt | None:
        """Append the text after a turn's answer to the turn's tokens; None if it can't follow them."""
        ids = self.chat.append(self.end_of(parent.response), rest)
        if ids is None or self.chat.hidden(new, rest) is not None:
            return None
        return NextPrompt(parent.ids + ids, parent.text + rest, parent, None, run.counts)

    def _fresh(self, run: Run, messages: list[Message], tools: list[Any] | None, branch: Any) -> NextPrompt:
        text = self.chat.render(messages, tools)
        self.require_seen(messages, text)
        return NextPrompt(self.chat.encode(text), text, None, branch, run.counts)

    def _plain(self, run: Run, messages: list[Message], parent: Turn | None) -> list[Message]:
        """Count control tokens in messages that the model did not write, and break them up if the policy says so."""
        num_known = len(parent.conversation) if parent else 0
        plain = [message if message["role"] == "assistant" else self._without_control(message) for message in messages]
        run.counts["special_text"] += sum(map(operator.is_not, messages[num_known:], plain[num_known:]))
        return plain if self.special_text == "break" else messages

    def _without_control(self, message: Message) -> Message:
        """Return the message, or a copy with the texts of control tokens broken up."""
        content = message.get("content")
        controls = [text for text in self.chat.special.values() if any(text in part for part in texts_of(message))]
        for text in controls:
            broken = text[:1] + _JOINER + text[1:]
            if isinstance(content, str):
                content = content.replace(text, broken)
            elif content is not None:
                content = [
                    part | {"text": part["text"].replace(text, broken)} if "text" in part else part for part in content
                ]
        return {**message, "content": content} if controls else message

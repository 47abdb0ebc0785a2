"""Converts messages to token ids and back without re-encoding sampled tokens.

The prompt of a turn is the tokens of its parent turn plus new tokens, found by rendering the conversation as text with
each answer put back as sampled. If the template rewrites history, the policy `history` decides: `keep` appends what the
template writes after a dummy answer, so that the model sees its own tokens; `template` starts a branch with what the
template writes, as stock servers do.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from arealite.agent.turns import Branch, Run, Turn, continues
from arealite.chat.template import Message
from arealite.workflow.conversation import ChatModel


@dataclass(eq=False)
class NextPrompt:
    """The next prompt of the model."""

    ids: list[int]
    text: str
    """Text of the ids, with the template's end of an answer where the model sampled another."""
    parent: Turn | None
    """Turn whose tokens are a prefix of the ids."""
    branch: Branch | None = None
    """Reason why the ids do not continue a turn that the messages continue."""


class Bridge(ChatModel):
    """Builds the prompts of agents. Its methods take milliseconds; call them in one thread, not in the event loop."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: Literal["keep", "template"] = "keep",
        enable_thinking: bool = False,
    ) -> None:
        super().__init__(tokenizer, enable_thinking=enable_thinking)
        self.history = history

    def prompt(
        self, run: Run, messages: list[Message], tools: list[Any] | None, *, parent: Turn | None = None
    ) -> NextPrompt:
        """Return the prompt of a whole conversation; `parent` is the turn that it continues, if known.

        Raises ValueError, with a reason for the client, if the template rejects the messages or drops one of them.
        """
        tools = tools or None
        if parent is None or not continues(parent, messages):
            parent = run.parent_of(messages)
        if parent is None:
            return self._fresh(messages, tools, None)
        new = messages[len(parent.conversation) :]
        for text in self._candidates(parent, messages, tools):
            if text.startswith(parent.text) and (prompt := self._continued(parent, text[len(parent.text) :], new)):
                return prompt
        if tools != (parent.tools or None):
            return self._fresh(messages, tools, "tools")
        if self.history == "template":
            return self._fresh(messages, tools, "template")
        text, ids = self.glued(parent.response, parent.message, new, tools)
        return NextPrompt(parent.ids + ids, parent.text + text, parent)

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

    def _continued(self, parent: Turn, rest: str, new: list[Message]) -> NextPrompt | None:
        """Append the text after a turn's answer to the turn's tokens; None if it can't follow them."""
        ids = self.chat.append(self.end_of(parent.response), rest)
        if ids is None or self.chat.hidden(new, rest) is not None:
            return None
        return NextPrompt(parent.ids + ids, parent.text + rest, parent)

    def _fresh(self, messages: list[Message], tools: list[Any] | None, branch: Branch | None) -> NextPrompt:
        text = self.chat.render(messages, tools)
        self.require_seen(messages, text)
        return NextPrompt(self.chat.encode(text), text, None, branch)

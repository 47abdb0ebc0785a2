"""Conversations of one run: messages go in, answers come out, and what was sampled is never encoded again.

The prompt of a turn is the tokens so far and what the chat template writes between an answer and the new messages.
"""

import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, ContextOverflowError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.chat.answer import AnswerParser, MalformedCall, call_ids
from arealite.chat.template import ChatText, Message
from arealite.utils.background import in_thread
from arealite.workflow.trajectory import TrajectoryBuilder


class ChatModel:
    """The format of one model's conversations; shared by the runs of a workflow, which hold its lock in calls."""

    def __init__(self, tokenizer: Any, *, enable_thinking: bool = False) -> None:
        self.chat = ChatText(tokenizer, enable_thinking=enable_thinking)
        self.parser = AnswerParser(self.chat)
        self.lock = threading.Lock()  # a tokenizer serves one thread at a time

    def require_calls(self) -> None:
        """Raise ConfigError if the model's calls of tools can't be read."""
        if self.parser.call_format is None and not getattr(self.chat.tokenizer, "response_template", None):
            raise ConfigError(
                "a workflow with tools must have a chat template that writes calls of tools in a known format: got "
                f"that of {self.chat.tokenizer.name_or_path}. Use a model that calls tools, or another "
                "chat_template.jinja in tokenizer_path."
            )

    def end_of(self, response: ModelResponse) -> int | None:
        """Return the special token with which the model ended its answer."""
        last = response.output_tokens[-1] if response.output_tokens else None
        ends = response.stop_reason == "stop" and not response.matched_stop
        return last if ends and last in self.chat.special else None

    def read(
        self, response: ModelResponse, prompt_text: str, tools: list[Any] | None, counts: Counter[str]
    ) -> tuple[str, Message]:
        """Return what was sampled as text, and as a message.

        A call of a tool that can't be read stays text, and is counted as `malformed_calls`, also by kind.
        """
        num_text = response.output_len - (self.end_of(response) is not None)
        raw_text = self.chat.decode(response.input_tokens, response.output_tokens[:num_text])
        shown = raw_text.partition(response.matched_stop)[0] if response.matched_stop else raw_text
        for readable in (tools, None):  # without calls if they can't be read
            try:
                message = self.parser.parse(shown, prompt_text=prompt_text, tools=readable)
                break
            except MalformedCall as error:
                counts.update(("malformed_calls", f"malformed_calls_{error.kind}"))
                message = {"role": "assistant", "content": shown}
        calls = message.get("tool_calls", [])
        ids = call_ids([*response.input_tokens, *response.output_tokens], len(calls))
        for call, name in zip(calls, ids, strict=True):
            call.setdefault("id", name)
        return raw_text, message

    def glued(
        self, response: ModelResponse, message: Message, new: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[int]]:
        """Return what the template writes between an answer and the answer to new messages, as text and as tokens.

        Raises ValueError if the template drops one of them.
        """
        text = self.chat.glue(message, new, tools)
        self.require_seen(new, text)
        ids = self.chat.append(self.end_of(response), text, is_glue=True)
        assert ids is not None, text
        return text, ids

    def require_seen(self, messages: Sequence[Message], text: str) -> None:
        """Raise ValueError if the template has left one of the messages out of a text."""
        if (hidden := self.chat.hidden(messages, text)) is not None:
            raise ValueError(
                f"the model must see every message: got a chat template that drops those of role {hidden['role']!r}. "
                "Use a model whose template writes them, or send their content as the user's."
            )


class Conversation:
    """One run: `await ask(messages)` until it is over, then `builder.finish(reward)`."""

    builder: TrajectoryBuilder  # from the first turn on
    response: ModelResponse  # of the last turn

    def __init__(
        self,
        engine: InferenceEngine,
        model: ChatModel,
        gconfig: GenerationHyperparameters,
        *,
        sample: int,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`sample` numbers the run in its group; `tools` are JSON schemas."""
        self.num_turns, self.counts = 0, Counter[str]()
        self._engine, self._model, self._gconfig = engine, model, gconfig.new(n_samples=1)
        self._sample, self._tools = sample, list(tools) or None
        self._rid = uuid.uuid4().hex  # turns of one run stay on the server that has their prefix
        self._text = ""  # text of the last prompt, from the new messages on
        self._message: Message = {}  # of the last turn

    async def ask(self, messages: Sequence[Message]) -> Message | None:
        """Return the answer to further messages, with `tool_calls` if it has any; None if they do not fit the context.

        Half a character (a lone surrogate) becomes U+FFFD. Raises ContextOverflowError if already the first messages do
        not fit, and ValueError if the chat template refuses them.
        """
        ids = await in_thread(self._encode, [_whole(message) for message in messages])
        if not self.num_turns:
            self.builder = TrajectoryBuilder(ids)
        else:
            self.builder.extend(ids)
        request = ModelRequest(self.builder.ids, self._gconfig, rid=self._rid, seed_key=str(self._sample))
        try:
            self.response = await self._engine.agenerate(request)
        except ContextOverflowError:
            if not self.num_turns:
                raise
            return None
        self.num_turns += 1
        self.builder.add(self.response)
        self._message = await in_thread(self._read)
        return self._message

    def _encode(self, messages: list[Message]) -> list[int]:
        chat = self._model.chat
        with self._model.lock:
            if not self.num_turns:
                self._text = chat.render(messages, self._tools)
                return chat.encode(self._text)
            self._text, ids = self._model.glued(self.response, self._message, messages, self._tools)
            return ids

    def _read(self) -> Message:
        with self._model.lock:
            return self._model.read(self.response, self._text, self._tools, self.counts)[1]


def _whole(message: Message) -> Message:
    """Return a message without halves of characters, which tools and environments may return and nothing can encode."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")}

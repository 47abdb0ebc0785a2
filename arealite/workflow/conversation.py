"""Conversations of one run: messages go in, answers come out, and what was sampled is never encoded again.

The prompt of a turn is the tokens so far and what the chat template writes between an answer and the new messages.
"""

import threading
import uuid
from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, ContextOverflowError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.utils.chat_answer import AnswerParser, MalformedCall, call_ids
from arealite.utils.chat_text import ChatText, Message
from arealite.utils.threads import in_thread
from arealite.workflow.trajectory import TrajectoryBuilder


class ChatModel:
    """How one model writes conversations; shared by the runs of a workflow."""

    def __init__(self, tokenizer: Any, *, enable_thinking: bool = False) -> None:
        self.text = ChatText(tokenizer, enable_thinking=enable_thinking)
        self.parser = AnswerParser(self.text)
        self.lock = threading.Lock()  # a tokenizer serves one thread at a time

    def require_calls(self) -> None:
        """Raise ConfigError if the model's calls of tools can't be read."""
        if self.parser.call_format is None and not getattr(self.text.tokenizer, "response_template", None):
            raise ConfigError(
                "a workflow with tools must have a chat template that writes calls of tools in a known format: got "
                f"that of {self.text.tokenizer.name_or_path}. Use a model that calls tools, or another "
                "chat_template.jinja in tokenizer_path."
            )


class Conversation:
    """One run: `await ask(messages)` until it is over, then `builder.finish(reward)`."""

    builder: TrajectoryBuilder  # there after the first turn
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
        self.num_turns = self.num_malformed_calls = 0
        self._engine, self._model, self._gconfig = engine, model, gconfig.new(n_samples=1)
        self._sample, self._tools = sample, list(tools) or None
        self._rid = uuid.uuid4().hex  # turns of one run stay on the server that has their prefix
        self._text = ""  # what the prompt of the last turn stands for, from where the new messages begin
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
        self._message = await in_thread(self._read, self.response)
        return self._message

    def _encode(self, messages: list[Message]) -> list[int]:
        chat = self._model.text
        with self._model.lock:
            if not self.num_turns:
                self._text = chat.render(messages, self._tools)
                return chat.encode(self._text)
            self._text = chat.glue(self._message, messages, self._tools)
            if (hidden := chat.hidden(messages, self._text)) is not None:
                raise ValueError(
                    "the chat template must write every message: got one that drops those of role "
                    f"{hidden['role']!r}. Use another template, or send their content as the user's."
                )
            ids = chat.append(self._end, self._text, is_glue=True)
            assert ids is not None, self._text
            return ids

    def _read(self, response: ModelResponse) -> Message:
        with self._model.lock:
            sampled = response.output_tokens[: None if self._end is None else -1]
            text = self._model.text.decode(response.input_tokens, sampled)
            if response.matched_stop:
                text = text.partition(response.matched_stop)[0]
            message: Message = {"role": "assistant", "content": text}
            try:
                message = self._model.parser.parse(text, prompt_text=self._text, tools=self._tools)
            except MalformedCall:
                self.num_malformed_calls += 1
        calls = message.get("tool_calls", [])
        for call, name in zip(calls, call_ids(self.builder.ids, len(calls)), strict=True):
            call.setdefault("id", name)
        return message

    @property
    def _end(self) -> int | None:
        """The special token with which the model ended its answer."""
        response = self.response
        last = response.output_tokens[-1] if response.output_tokens else None
        ends = response.stop_reason == "stop" and not response.matched_stop
        return last if ends and last in self._model.text.special else None


def _whole(message: Message) -> Message:
    """Return a message without halves of characters, which tools and environments may return and nothing can encode."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")}

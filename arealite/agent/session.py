"""One run of an agent in the proxy: its keys, calls in progress, limits and turns.

A call is *delivered* once the whole answer was written to a connected client. Invariants: a turn is in the run before
its client receives it; a turn that no client has received or asked for again within `retry_grace` is not in the run at
its end; requests after the end change nothing. All state changes in the proxy's event loop.
"""

import asyncio
import contextvars
import hashlib
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from arealite.agent.bridge import Bridge, NextPrompt
from arealite.agent.turns import Run, Turn
from arealite.agent.wire.base import Answer, Call, RefusedError, Wire
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ContextOverflowError
from arealite.api.io_struct import ModelRequest, ModelResponse

T = TypeVar("T")
logger = logging.getLogger("arealite.agent")

_KEY_BYTES = 24


def new_key() -> str:
    """Return a key that nobody guesses."""
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


@dataclass(eq=False)
class Delivery:
    """An answer in progress: the task that computes it, and whether a client waits for it."""

    answer_id: str
    task: asyncio.Task[Answer]
    num_clients: int = 0
    num_delivered: int = 0
    """Clients that received it, or are receiving its end: they may act before the write returns."""
    is_over: bool = False
    """Whether no client may ask for it again."""
    expiry: asyncio.TimerHandle | None = None


@dataclass(frozen=True)
class Model:
    """State shared by all runs of a workflow."""

    bridge: Bridge
    tokenizer: Any
    gconfig: GenerationHyperparameters
    config: AgentConfig
    tokenizing: Executor
    """One thread, as tokenizers are not thread-safe."""


@dataclass(eq=False)
class Session:
    """An open run; created in the episode's loop and context, in which its engine requests run."""

    engine: InferenceEngine
    model: Model
    seed_key: str
    run: Run = field(default_factory=Run)
    key: str = field(default_factory=new_key)
    untrained_key: str = field(default_factory=new_key)
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of turns, sampled tokens, retries, orphans and ignored parameters."""
    limit: str | None = None
    """The limit that a call exceeded, if any."""

    def __post_init__(self) -> None:
        self.loop, self.context = asyncio.get_running_loop(), contextvars.copy_context()
        self.failure: asyncio.Future[None] = self.loop.create_future()  # fails with the engine's error
        self.is_open = True
        self.num_busy = 0  # requests in progress
        self.last_seen_s = time.monotonic()  # time of the last end
        self._deliveries: defaultdict[bytes, list[Delivery]] = defaultdict(list)
        self._answers: dict[str, Answer] = {}

    # In the proxy's loop

    def deliver(self, wire: Wire, raw: bytes, body: dict[str, Any], *, is_retry: bool, is_trained: bool) -> Delivery:
        """Return the delivery of a request: a pending one of the same request or a new one. Raises RefusedError."""
        key = hashlib.blake2b(f"{wire.prefix}{is_trained}".encode() + raw).digest()
        same = self._deliveries[key] = [delivery for delivery in self._deliveries[key] if not delivery.is_over]
        lost = [delivery for delivery in same if not (delivery.num_clients or delivery.num_delivered)]
        if lost or (is_retry and same):
            self.counts["retries"] += 1
            delivery = (lost or same)[-1]
        else:
            call = wire.parse(body, self.find)
            answer_id = wire.prefix + secrets.token_hex(12)
            task = asyncio.create_task(self._answer(call, answer_id, is_trained=is_trained))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the client has left
            delivery = Delivery(answer_id, task)
            same.append(delivery)
            self.counts.update(f"ignored/{name}" for name in call.not_obeyed)
        if delivery.expiry is not None:
            delivery.expiry.cancel()
        delivery.num_clients += 1
        self.num_busy += 1
        return delivery

    def leave(self, delivery: Delivery) -> None:
        """Record that a client has received its answer or left without it."""
        delivery.num_clients -= 1
        self.num_busy, self.last_seen_s = self.num_busy - 1, time.monotonic()
        if not delivery.num_delivered and not delivery.num_clients and self.is_open:
            grace_s = self.model.config.retry_grace
            delivery.expiry = asyncio.get_running_loop().call_later(grace_s, self._forget, delivery)

    def find(self, answer_id: str) -> Answer:
        """Return an earlier answer by its id."""
        if answer_id not in self._answers:
            raise RefusedError(
                f"the answer before must be one of this run: got {answer_id!r:.60}. Send the whole conversation.",
                code="previous_response_not_found",
            )
        return self._answers[answer_id]

    async def count_tokens(self, call: Call) -> int:
        """Return the length of the prompt of a call."""
        prompt = await self.tokenized(self._prompt, call, self._parent(call))
        return len(prompt.ids)

    def close(self) -> None:
        """End the run: later requests change nothing, undelivered turns are discarded."""
        for delivery in [delivery for same in self._deliveries.values() for delivery in same]:
            if not delivery.num_delivered:
                self._forget(delivery)
        self.is_open = False

    def _forget(self, delivery: Delivery) -> None:
        """Discard an answer that no client has received."""
        if delivery.expiry is not None:
            delivery.expiry.cancel()
        if delivery.is_over:
            return
        delivery.is_over = True
        if delivery.task.done() and (delivery.task.cancelled() or delivery.task.exception() is not None):
            return
        delivery.task.cancel()
        self._answers.pop(delivery.answer_id, None)
        self.counts["orphans"] += 1
        self.model.tokenizing.submit(self.run.discard, delivery.answer_id)  # the thread that adds turns

    async def _answer(self, call: Call, answer_id: str, *, is_trained: bool) -> Answer:
        prompt = await self.tokenized(self._prompt, call, self._parent(call))
        response = await self._generate(self._request(call, prompt))
        turn = await self.tokenized(self._add, answer_id, call, prompt, response, is_trained)
        answer = self._answers[answer_id] = Answer(answer_id, int(time.time()), call, turn)
        return answer

    def _parent(self, call: Call) -> Turn | None:
        return None if call.parent is None else self.find(call.parent).turn

    def _prompt(self, call: Call, parent: Turn | None) -> NextPrompt:
        try:
            prompt = self.model.bridge.prompt(self.run, call.messages, call.tools, parent=parent)
        except ValueError as error:
            raise RefusedError(str(error), code="invalid_prompt") from error
        if prompt.parent is not None:
            self.run.continued.add(prompt.parent)
        return prompt

    def _request(self, call: Call, prompt: NextPrompt) -> ModelRequest:
        """Build the engine's request within the limits of the run."""
        config, gconfig, counts = self.model.config, self.model.gconfig, self.counts
        num_turns = counts["turns"] + 1
        if config.max_turns is not None and num_turns > config.max_turns:
            raise self._refuse("max_turns", f"a run must have at most {config.max_turns} turns: got {num_turns}.")
        room = [gconfig.max_new_tokens, *([call.max_tokens] if call.max_tokens else [])]
        if config.max_sampled_tokens is not None:
            if counts["tokens"] >= config.max_sampled_tokens:
                message = f"a run must sample at most {config.max_sampled_tokens} tokens: got {counts['tokens']}."
                raise self._refuse("max_sampled_tokens", message)
            room.append(config.max_sampled_tokens - counts["tokens"])
        counts["turns"] = num_turns
        gconfig = gconfig.new(n_samples=1, max_new_tokens=min(room), stop=call.stop or gconfig.stop)
        return ModelRequest(prompt.ids, gconfig, rid=self.key, seed_key=self.seed_key)

    def _refuse(self, limit: str, message: str) -> RefusedError:
        self.limit = limit
        return RefusedError(f"{message} End the run here, or raise agent.{limit}.", code=limit)

    async def _generate(self, request: ModelRequest) -> ModelResponse:
        """Call the engine in the loop and context of the episode, which owns seeds, account and clock."""
        asked = self.context.copy().run(asyncio.run_coroutine_threadsafe, self.engine.agenerate(request), self.loop)
        try:
            response = await asyncio.wrap_future(asked)
        except ContextOverflowError as error:
            self.limit = "context"
            message = f"prompt is too long: {len(request.input_ids)} tokens leave no room in the context. {error}"
            raise RefusedError(message, code="context_length_exceeded") from error
        except Exception as error:
            self.loop.call_soon_threadsafe(self._fail, error)
            message = f"the run has ended, as its episode failed ({type(error).__name__}). Send nothing more."
            raise RefusedError(message, code="run_failed") from error
        self.counts["tokens"] += response.output_len
        return response

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _add(self, turn_id: str, call: Call, prompt: NextPrompt, response: ModelResponse, is_trained: bool) -> Turn:
        """Add the turn of a response to the run."""
        raw_text, message = self.model.bridge.read(response, prompt.text, call.tools, self.run.counts)
        texts = (prompt.text, raw_text, call.messages, message)
        turn = Turn(turn_id, prompt.parent, response, *texts, is_trained, call.tools, prompt.branch)
        self.run.add(turn)
        return turn

    async def tokenized(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that uses the tokenizer in its thread, where turns are added and discarded."""
        return await asyncio.get_running_loop().run_in_executor(self.model.tokenizing, function, *args)

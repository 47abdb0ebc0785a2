"""A scripted model behind a real proxy: what it samples is a function of the prompt's text, in tokens of one byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testing_quickstart import make_tiny_model

from arealite.agent.bridge import Bridge
from arealite.agent.server import Proxy
from arealite.agent.session import Model, Session
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.utils.background import DaemonThreads
from arealite.utils.hf import load_hf_tokenizer

END = "<|im_end|>"
CHATML = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chatml_tokenizer(folder: Path) -> Any:
    """Return a byte-level tokenizer whose chat template writes calls of tools."""
    tokenizer = load_hf_tokenizer(make_tiny_model(folder, ["What is 1+1? The answer is 2."], layers=1))
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


def tool_call(name: str, arguments: str) -> str:
    """Return what the model writes to call a tool; `arguments` is JSON, with the model's own spaces."""
    return f'<tool_call>\n{{"name":"{name}", "arguments":{arguments}}}\n</tool_call>'


@dataclass
class ScriptedModel:
    """An engine; `answers` returns the text that follows a prompt's. One in `...` is cut off."""

    answers: Callable[[str], str]
    tokenizer: Any
    may_answer: asyncio.Event | None = None
    """If there is one, answers wait for it."""
    responses: list[ModelResponse] = field(default_factory=list)
    num_running: int = 0
    num_cancelled: int = 0
    errors: list[Exception] = field(default_factory=list)
    """What the next requests fail with."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.num_running += 1
        try:
            if self.may_answer is not None:
                await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if self.errors:
            raise self.errors.pop(0)
        text = self.answers(self.tokenizer.decode(req.input_ids))
        tokens = [id for letter in text.removesuffix("...") for id in self._ids(letter)]
        tokens = tokens if text.endswith("...") else [*tokens, self.tokenizer.eos_token_id]
        is_cut = text.endswith("...") or len(tokens) > req.gconfig.max_new_tokens
        tokens = tokens[: req.gconfig.max_new_tokens]
        matched = next((stop for stop in req.gconfig.stop if stop in text), None)
        logprobs = [-(token + 1) / 1000 for token in tokens]
        reason = "length" if is_cut else "stop"
        versions = [3] * len(tokens)
        response = ModelResponse(list(req.input_ids), tokens, logprobs, versions, reason, "", matched_stop=matched)
        self.responses.append(response)
        return response

    def get_version(self) -> int:
        return 3

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


InferenceEngine.register(ScriptedModel)


@contextlib.asynccontextmanager
async def proxied(model: ScriptedModel, **config: Any) -> AsyncIterator[tuple[Proxy, Session]]:
    """Serve one run of an agent."""
    agent_config = AgentConfig(**config)
    gconfig = GenerationHyperparameters(max_new_tokens=200)
    tokenizing = DaemonThreads(1, "agent-tokenizer")
    bridge = Bridge(model.tokenizer, history=agent_config.history)
    shared = Model(bridge, model.tokenizer, gconfig, agent_config, tokenizing)
    proxy = Proxy(heartbeat_s=agent_config.heartbeat_s)
    session = Session(model, shared, seed_key="0")  # type: ignore[arg-type]
    await proxy.open(session)
    try:
        yield proxy, session
    finally:
        await proxy.end(session)
        await asyncio.to_thread(proxy.close)
        tokenizing.shutdown()


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that must come true."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


def ids_equal(session: Session, model: ScriptedModel) -> bool:
    """Tell whether the turns of a run have exactly the ids that the model was given and sampled, in any order."""
    sampled = [(one.input_tokens, one.output_tokens) for one in model.responses]
    return sorted((one.response.input_tokens, one.response.output_tokens) for one in session.run.turns) == sorted(
        sampled
    )

"""An engine whose model says what a test decides, in tokens of its own choice."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from testing_agents import drifted

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ContextOverflowError
from arealite.api.io_struct import ModelRequest, ModelResponse


class SayingEngine:
    """Answers a prompt with `says(prompt text)`, a text or an awaitable of one; the end token follows."""

    def __init__(self, tokenizer: Any, says: Callable[[str], Any], context: int = 100_000) -> None:
        self.tokenizer, self.says, self.context = tokenizer, says, context
        self.requests: list[ModelRequest] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        if len(req.input_ids) > self.context:
            raise ContextOverflowError(f"a prompt must fit {self.context} tokens: got {len(req.input_ids)}.")
        text = self.says(self.tokenizer.decode(req.input_ids))
        text = await text if inspect.isawaitable(text) else text
        ids = [*drifted(self.tokenizer, text), self.tokenizer.eos_token_id]
        version = len(self.requests)
        return ModelResponse(list(req.input_ids), ids, [-0.5] * len(ids), [version] * len(ids), "stop", "here:1")


InferenceEngine.register(SayingEngine)


def call(name: str, **arguments: Any) -> str:
    """Return a call as Qwen2.5 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sampled_texts(tokenizer: Any, row: Any) -> list[str]:
    """Return what was sampled in a row, turn by turn."""
    texts, before = [], 0
    for token, mask in zip(row["input_ids"].tolist(), row["loss_mask"].tolist(), strict=True):
        if mask and not before:
            texts.append("")
        texts[-1:] = [texts[-1] + tokenizer.decode([token])] if mask else texts[-1:]
        before = mask
    return texts

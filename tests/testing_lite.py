"""Real embedded servers on real ports, in threads of this process."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import Any

import torch
from aiohttp import web
from transformers import PreTrainedModel

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.server.app import Server


class LiteServer:
    """One server; run it with `testing_server.serve`. `engine` and `model` are for what HTTP can't do."""

    def __init__(self, model: PreTrainedModel, *, slots: int = 8, context: int = 256, **options: Any) -> None:
        self.model = model
        self.engine = GenerationEngine(ModelRunner(model, slots=slots, context=context), **options)
        self.address = ""

    def app(self) -> web.Application:
        return Server(self.engine, model_path="tiny").app

    async def close(self, _: web.Application) -> None:
        await asyncio.to_thread(self.engine.close)

    def post(self, endpoint: str, **body: Any) -> dict[str, Any]:
        """Post as someone who is not our client."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}{endpoint}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


def slow_down(model: PreTrainedModel) -> None:
    """Let each step of an engine take 5 ms, in which other threads run: a test acts before a completion ends."""
    if not model._forward_pre_hooks:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.005))


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return copies of all weights by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def logprobs_by(model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Score an output by the model's own forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(output)), output]

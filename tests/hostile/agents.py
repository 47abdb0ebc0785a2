"""Agents that do everything wrong, through the real executor, proxy and processes.

Invariants: every failure is counted by its kind, none becomes a reward, and nothing of an agent is left: no process, no
connection, no thread but those that it has started itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from testing_proxy import ScriptedModel, chatml_tokenizer
from testing_workflows import IdleEngine

from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.api.workflow_api import RolloutWorkflow
from hostile import agent_acts
from hostile.code import run_workflows
from hostile.common import DEADLINE_S, Report, Usage, settled

_EPISODE_S = 20.0
"""Long enough for an honest agent on a loaded machine."""
_GROUP = 2
_KEPT = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards", "sample_index")
_COMMAND = r"""read -r row; eval "$(printf %s "$row" | sed -n 's/.*"act": "\([^"]*\)".*/\1/p')" """


class SamplingEngine(IdleEngine):
    """Samples what a script says, with its own version."""

    model: ScriptedModel

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        version = self.version
        if "slowly" in self.model.tokenizer.decode(req.input_ids):
            await asyncio.sleep(_EPISODE_S / 4)
        response = await self.model.agenerate(req)
        response.output_versions = [version] * response.output_len
        return response


class HostileAgents(RolloutWorkflow):
    """Has each prompt's agents do what its number says."""

    def __init__(self, tokenizer: Any, plan: list[tuple[str, str, set[str]]]) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        gconfig = GenerationHyperparameters(n_samples=_GROUP, max_new_tokens=200)
        self.workflows: dict[str, Any] = {
            "coroutine": AgentWorkflow(agent_acts.coroutine, gconfig, tokenizer),
            "function": AgentWorkflow(agent_acts.function, gconfig, tokenizer, num_processes=8),
            "command": AgentWorkflow(_COMMAND, gconfig, tokenizer),
        }

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        kind, name, _ = self.plan[data["prompt_id"].index]
        batch = await self.workflows[kind].arun_episode(engine, data | {"act": name})
        return None if batch is None else batch.select(*_KEPT)

    def expected(self, index: int) -> set[str]:
        return self.plan[index][2]

    def name_of(self, index: int) -> str:
        return " ".join(self.plan[index][:2])

    def close(self) -> None:
        for workflow in self.workflows.values():
            workflow.close()


def everything() -> Iterator[tuple[str, str, set[str]]]:
    """Yield who does what, and the states that it may end in."""
    for name, (_, states) in agent_acts.COROUTINES.items():
        yield "coroutine", name, states
    for name, (_, states) in agent_acts.FUNCTIONS.items():
        yield "function", name, states
    for command, states in agent_acts.COMMANDS.items():
        yield "command", command, states


def attack(report: Report, folder: Path, rng: random.Random, *, short: bool) -> None:
    """Run them all, and look at what is left."""
    torch.set_num_threads(1)
    tokenizer = chatml_tokenizer(folder / "tokenizer")
    before = Usage.of(os.getpid())
    plan = list(everything()) * (1 if short else 3)
    plan += [("coroutine", "talks", agent_acts.DONE)] * (len(plan) // 3)
    rng.shuffle(plan)
    workflow = HostileAgents(tokenizer, plan)
    SamplingEngine.model = ScriptedModel(lambda prompt: "7", tokenizer)
    try:
        run_workflows(report, folder / "runs", workflow, engine_type=SamplingEngine, episode_s=_EPISODE_S)
    finally:
        began = time.monotonic()
        workflow.close()
    if (took := time.monotonic() - began) > DEADLINE_S:
        report.broken.append(
            f"agents must end within {DEADLINE_S:g} s when their workflow is closed: it took {took:.0f} s"
        )
    report.leaks += settled(lambda: before.leaks(Usage.of(os.getpid()), what="the trainer", inputs=report.tried))

"""Real workflows that need no model: one that samples from a server, one that only waits; an engine for the latter."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.executor import RolloutExecutor
from arealite.utils.tensors import concat_padded_tensors
from arealite.workflow.trajectory import trajectory_from_response


class SamplingWorkflow(RolloutWorkflow):
    """Samples a group for the prompt `row["input_ids"]`; the reward is the first token."""

    def __init__(self, **gconfig: Any) -> None:
        self.gconfig = GenerationHyperparameters(**gconfig)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        gconfig = self.gconfig.new(n_samples=1)
        requests = [
            ModelRequest(data["input_ids"], gconfig, rid=str(data["prompt_id"])) for _ in range(self.gconfig.n_samples)
        ]
        responses = await asyncio.gather(*(engine.agenerate(request) for request in requests))
        return concat_padded_tensors([trajectory_from_response(one, float(one.output_tokens[0])) for one in responses])


def waiting_trajectory(index: int, version: int, length: int = 3) -> TensorDict:
    """Return one row that says which prompt it belongs to."""
    response = ModelResponse(
        [index], [index] * (length - 1), [-1.0] * (length - 1), [version] * (length - 1), "stop", ""
    )
    return trajectory_from_response(response, float(index))


@dataclasses.dataclass
class WaitingWorkflow(RolloutWorkflow):
    """Needs no server: waits for as long as `row["delay_s"]` says, then does what `act` says (default: one row)."""

    act: Callable[[InferenceEngine, dict[str, Any]], TensorDict | None] = dataclasses.field(
        default=lambda engine, row: waiting_trajectory(row["prompt_id"].index, engine.get_version())
    )
    started: list[Any] = dataclasses.field(default_factory=list)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        self.started.append(data["prompt_id"])
        version = engine.get_version()
        await asyncio.sleep(data.get("delay_s", 0.0))
        result = self.act(engine, data)
        if result is not None:
            result["versions"] = torch.where(result["loss_mask"].bool(), version, -1)
        return result


class IdleEngine(InferenceEngine):
    """An engine that has a version and an executor, and samples nothing."""

    def __init__(self, config: InferenceEngineConfig, executor_type: type[RolloutExecutor] = RolloutExecutor) -> None:
        self.version = 0
        self.executor = executor_type(config, self)

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version
        self.executor.set_version(version)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        raise NotImplementedError

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        raise NotImplementedError

    initialize = destroy = submit = wait = rollout_batch = prepare_batch = evaluate_batch = pause = resume = None  # type: ignore[assignment]
    state_dict = load_state_dict = note_checkpoint = None  # type: ignore[assignment]

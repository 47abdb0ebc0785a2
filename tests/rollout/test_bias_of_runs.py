"""Runs whose episodes differ 20-fold in latency: who is trained on, by the bias report of the run."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict
from testing_workflows import IdleEngine, waiting_trajectory

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.workflow_api import RolloutWorkflow
from arealite.dataset.loader import PromptLoader
from arealite.rollout.account.audit import audit
from arealite.rollout.account.bias import Bias

_FASTEST_S, _SPREAD = 0.005, 20
_STEPS, _BATCH = 60, 16


class Waiting(RolloutWorkflow):
    """Waits as long as the row says, then rejects one in six, whoever it is."""

    def __init__(self) -> None:
        self.rng = random.Random(7)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        version = engine.get_version()
        await asyncio.sleep(data["delay_s"])
        return None if self.rng.random() < 1 / 6 else waiting_trajectory(data["prompt_id"].index, version)


def latency_bias(folder: Path, overdue: Literal["wait", "drop"]) -> Bias:
    torch.set_num_threads(1)
    rng = random.Random(3)
    dataset = [{"delay_s": _FASTEST_S * _SPREAD ** rng.random()} for _ in range(2000)]
    loader = PromptLoader(dataset, _BATCH)
    config = InferenceEngineConfig(
        consumer_batch_size=_BATCH,
        max_head_offpolicyness=1,
        max_concurrent_rollouts=4 * _BATCH,
        overdue=overdue,
        fileroot=str(folder),
        experiment_name="bias",
        trial_name=overdue,
    )
    engine, workflow = IdleEngine(config), Waiting()
    for version in range(_STEPS):
        engine.executor.prepare_batch(loader, workflow)
        engine.set_version(version + 1)
    engine.executor.close()
    found = audit(folder / "bias" / overdue)
    assert (found.trained, found.lost, found.repeated) == (_STEPS * _BATCH, 0, 0)
    by_latency = found.bias[0]
    assert by_latency.parts[-1].low > 8 * by_latency.parts[0].low, "the spread has arrived in the report"
    return by_latency


@pytest.mark.parametrize("overdue", ["wait", "drop"])
def test_waiting_trains_on_the_slow_as_on_the_fast_and_dropping_does_not(
    tmp_path: Path, overdue: Literal["wait", "drop"]
) -> None:
    bias = latency_bias(tmp_path, overdue)
    assert bias.difference is not None and bias.standard_error is not None
    if overdue == "wait":
        assert abs(bias.difference) < 3.5 * bias.standard_error, bias
        assert all(part.dropped_shares.keys() <= {"rejected_workflow"} for part in bias.parts)
    else:
        assert bias.difference < -2 * bias.standard_error, bias
        assert bias.parts[-1].dropped_shares["rejected_overdue"] > 0.1

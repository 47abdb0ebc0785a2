"""Runs whose episodes differ 20-fold in duration: who is trained on, by the bias report of the run.

Time is virtual: whenever the executor has nothing left to do but wait, the episode that is due next ends.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict
from testing_adversary import Adversary, CorneredExecutor
from testing_workflows import IdleEngine, waiting_trajectory

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.dataset.loader import PromptLoader
from arealite.rollout.account.audit import Bias, audit
from arealite.rollout.prompts import SampleRecord, current_episode

_SHORTEST, _SPREAD = 50, 20
_STEPS, _BATCH = 40, 16


class VirtualTime(Adversary):
    """Episodes of `row["tokens"]` tokens last one unit of time per token; one in six is rejected, whoever it is."""

    def __init__(self) -> None:
        self.now = 0
        self.due: list[tuple[int, int, asyncio.Future[None]]] = []
        """Time, prompt and end of what runs; a heap."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        episode = current_episode.get()
        assert episode is not None
        episode.samples.append(SampleRecord(0, data["tokens"], 0.0, 0, ""))  # now: a dropped episode never ends
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.due, (self.now + data["tokens"], data["prompt_id"].index, end))
        await end
        return None if data["is_rejected"] else waiting_trajectory(data["prompt_id"].index, episode.head_version)

    def num_held(self) -> int:
        return sum(not end.done() for _, _, end in self.due)

    def end_one(self) -> None:
        while self.due:
            self.now, _, end = heapq.heappop(self.due)
            if not end.done():  # others were dropped
                end.set_result(None)
                return


def length_bias(folder: Path, overdue: Literal["wait", "drop"]) -> Bias:
    torch.set_num_threads(1)
    rng = random.Random(3)
    dataset = [
        {"tokens": round(_SHORTEST * _SPREAD ** rng.random()), "is_rejected": rng.random() < 1 / 6} for _ in range(2000)
    ]
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
    engine = IdleEngine(config, CorneredExecutor)
    assert isinstance(engine.executor, CorneredExecutor)
    workflow = engine.executor.adversary = VirtualTime()
    for version in range(_STEPS):
        engine.executor.prepare_batch(loader, workflow)
        engine.set_version(version + 1)
    engine.executor.close()
    found = audit(folder / "bias" / overdue)
    assert (found.trained, found.lost, found.repeated) == (_STEPS * _BATCH, 0, 0)
    by_length = found.bias[1]
    assert by_length.measure == "tokens" and by_length.parts[-1].low > 8 * by_length.parts[0].low
    return by_length


@pytest.mark.parametrize("overdue", ["wait", "drop"])
def test_waiting_trains_on_the_slow_as_on_the_fast_and_dropping_does_not(
    tmp_path: Path, overdue: Literal["wait", "drop"]
) -> None:
    bias = length_bias(tmp_path, overdue)
    assert bias.difference is not None and bias.standard_error is not None
    if overdue == "wait":
        assert abs(bias.difference) < 3.5 * bias.standard_error, bias
        assert all(part.dropped_shares.keys() <= {"rejected_workflow"} for part in bias.parts)
    else:
        assert bias.difference < -2 * bias.standard_error, bias
        assert bias.parts[-1].dropped_shares["rejected_overdue"] > 0.1

"""The real executor against an adversary that decides which episode ends next, and how.

The adversary moves only when the executor has nothing left to do but wait (or while the trainer trains), so that it
holds back what is due for as long as anything else can end, and a run depends on its seed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from testing_workflows import IdleEngine, waiting_trajectory

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import PromptId
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.episode import Episode, current_episode
from arealite.rollout.executor import RolloutExecutor

_RETRIES = 1
_VERSIONS = 10


class HeldWorkflow(RolloutWorkflow):
    """Its episodes end when and as the adversary says."""

    def __init__(self, rng: random.Random, straggler_share: float) -> None:
        self.rng = rng
        self.straggler_share = straggler_share
        self.is_kind = False
        """Accept whatever ends."""
        self.held: list[tuple[Episode, asyncio.Future[str]]] = []
        self.rejected: list[int] = []
        self.failed: list[int] = []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        episode = current_episode.get()
        assert episode is not None
        ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.held.append((episode, ending))
        outcome = await ending
        index = episode.prompt_id.index
        if outcome == "fail":
            self.failed += [index] * (episode.attempt == _RETRIES)
            raise OSError("flaky")
        if outcome != "accept":
            self.rejected.append(index)
        if outcome == "reject":
            return None
        trajectory = waiting_trajectory(index, engine.get_version())
        trajectory["versions"][0, 1] = episode.head_version
        trajectory["rewards"][0] = -1.0 if outcome == "filter" else 1.0
        return trajectory

    def end_one(self) -> None:
        """End an episode of the newest head, or sometimes of any."""
        self.rng.shuffle(self.held)
        if self.rng.random() < self.straggler_share:
            self.held.sort(key=lambda one: one[0].head_version)
        _, ending = self.held.pop()
        outcomes, weights = ("accept", "fail", "reject", "filter"), (14, 3, 2, 1)
        ending.set_result("accept" if self.is_kind else self.rng.choices(outcomes, weights)[0])

    async def end_some(self) -> None:
        """End any number of episodes, and let the executor note it."""
        for _ in range(self.rng.randint(0, len(self.held))):
            self.end_one()
        for _ in range(5):
            await asyncio.sleep(0)


class CorneredExecutor(RolloutExecutor):
    """Lets the adversary move before each wait."""

    adversary: HeldWorkflow

    async def _wait_for_change(self, deadline: float | None) -> bool:
        self.adversary.end_one()
        return await super()._wait_for_change(deadline)


class Run:
    """A trainer of `_VERSIONS` batches that keeps books of its own."""

    def __init__(self, rng: random.Random, straggler_share: float, **config: Any) -> None:
        config |= {"episode_retries": _RETRIES, "max_failed_episodes": 10**6, "episode_timeout": 10.0}
        self.engine = IdleEngine(InferenceEngineConfig(**config), CorneredExecutor)
        self.executor = self.engine.executor
        assert isinstance(self.executor, CorneredExecutor)
        self.workflow = self.executor.adversary = HeldWorkflow(rng, straggler_share)
        self.issued: list[int] = []
        self.consumed: list[int] = []
        self.staleness: list[int] = []

    def loader(self, num_rows: int) -> Iterator[list[dict[str, Any]]]:
        for first in itertools.count(0, num_rows):
            indices = range(first, first + num_rows)
            self.issued += indices
            yield [{"prompt_id": PromptId(0, index)} for index in indices]

    def train(self, batch: TensorDict) -> None:
        versions = batch["versions"][batch["loss_mask"].bool()]
        self.staleness += (self.engine.version - versions).tolist()
        self.consumed += batch["input_ids"][:, 0].tolist()
        self.executor.loop.run(self.workflow.end_some())
        self.engine.set_version(self.engine.version + 1)
        assert self.executor.stats.rejected == len(self.workflow.rejected), "none is dropped for its age"

    def num_pending(self) -> int:
        return len(self.issued) - len(self.consumed) - len(self.workflow.rejected) - len(self.workflow.failed)

    def go(self, num_rows: int) -> None:
        """Train, then consume what is pending."""
        loader = self.loader(num_rows)
        for _ in range(_VERSIONS):
            self.train(self.executor.prepare_batch(loader, self.workflow, lambda one: bool(one["rewards"][0] > 0)))
        self.workflow.is_kind = True
        while num_pending := self.num_pending():
            self.train(self.executor.wait(min(num_pending, self.executor.config.consumer_batch_size)))


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    num_rows=st.integers(1, 5),
    max_concurrent=st.sampled_from([2, 5, 64]),
    straggler_share=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_no_order_of_endings_breaks_the_bound_or_loses_a_prompt(
    eta: int, seed: int, batch_size: int, num_rows: int, max_concurrent: int, straggler_share: float
) -> None:
    torch.set_num_threads(1)
    run = Run(
        random.Random(seed),
        straggler_share,
        consumer_batch_size=batch_size,
        max_head_offpolicyness=eta,
        max_concurrent_rollouts=max_concurrent,
    )
    with contextlib.closing(run.executor):
        run.go(num_rows)
    assert len(run.staleness) == 2 * len(run.consumed) and min(run.staleness) >= 0 and max(run.staleness) <= eta
    stats, workflow = run.executor.stats, run.workflow
    assert sorted(run.consumed + workflow.rejected + workflow.failed) == run.issued == list(range(len(run.issued)))
    assert (stats.submitted, stats.accepted, stats.failed, stats.running) == (
        len(run.issued),
        len(run.consumed),
        len(workflow.failed),
        0,
    )

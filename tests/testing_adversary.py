"""An adversary that decides which episode of a real executor ends next, and how.

It moves only when the executor has nothing left to do but wait (or while the trainer trains), so that it holds back
what is due for as long as anything else can end, and a run depends on its seed alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

from tensordict import TensorDict
from testing_workflows import waiting_trajectory

from arealite.api.engine_api import InferenceEngine
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.executor import RolloutExecutor
from arealite.rollout.prompts import Episode, current_episode

RETRIES = 1


class Adversary(RolloutWorkflow):
    """A workflow whose episodes do not end before `end_one` ends one of them."""

    def num_held(self) -> int:
        """Return how many episodes have started and have not been ended or dropped."""
        raise NotImplementedError

    def end_one(self) -> None:
        raise NotImplementedError


class HeldWorkflow(Adversary):
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
            self.failed += [index] * (episode.attempt == RETRIES)
            raise OSError("flaky")
        if outcome != "accept":
            self.rejected.append(index)
        if outcome == "reject":
            return None
        trajectory = waiting_trajectory(index, engine.get_version())
        trajectory["versions"][0, 1] = episode.head_version
        trajectory["rewards"][0] = -1.0 if outcome == "filter" else 1.0
        return trajectory

    def num_held(self) -> int:
        self.held = [one for one in self.held if not one[1].done()]  # others were dropped
        return len(self.held)

    def end_one(self) -> None:
        """End an episode of the newest head, or sometimes of any."""
        if not self.num_held():
            return
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
    """Lets the adversary move before each wait, when all that may start has started and all ends are recorded."""

    adversary: Adversary

    async def _wait_for_change(self, running: Iterable[Episode]) -> None:
        while self._is_starting or self.adversary.num_held() != len(self._running):
            await asyncio.sleep(0)
        self.adversary.end_one()
        await super()._wait_for_change(running)

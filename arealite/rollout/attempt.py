"""One attempt at an episode: the user's workflow under a deadline, and its result checked.

Invariant: an attempt ends as an accepted trajectory, as None (rejected) or with an error; only the executor's own
cancellation leaves as CancelledError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tensordict import TensorDict

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.api.io_struct import PromptId
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.episode import Episode, current_episode
from arealite.rollout.prompts import Row
from arealite.rollout.trajectory import FinishedEpisode, check_trajectory

ShouldAccept = Callable[[TensorDict], bool]


@dataclass(frozen=True)
class Submission:
    """A prompt to run, by what, and who may reject the result."""

    row: Row
    workflow: RolloutWorkflow
    should_accept: ShouldAccept | None = None

    @property
    def prompt_id(self) -> PromptId:
        """The row's name."""
        prompt_id: PromptId = self.row["prompt_id"]
        return prompt_id


async def run_attempt(
    engine: InferenceEngine, submission: Submission, episode: Episode, *, oldest_version: int, timeout_s: float
) -> FinishedEpisode | None:
    """Run the workflow once, in the caller's task; None is rejected."""
    current_episode.set(episode)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            trajectory = await submission.workflow.arun_episode(engine, submission.row)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise EpisodeTimeoutError(
            f"an episode must end within rollout.episode_timeout = {timeout_s:g} s: prompt {submission.prompt_id} did "
            "not. Raise it, or shorten the episode."
        ) from error
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise EpisodeError("a workflow must not cancel itself: a task it awaited was cancelled.") from error
    if trajectory is None:
        return None
    finished = FinishedEpisode(episode, submission.workflow, check_trajectory(trajectory, oldest_version))
    if submission.should_accept is not None and not submission.should_accept(trajectory):
        return None
    return finished


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

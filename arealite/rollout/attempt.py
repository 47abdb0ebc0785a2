"""One attempt at an episode: the user's workflow under a deadline, and its result checked.

Invariant: an attempt ends as an accepted trajectory, as rejected or with an error; only the executor's own
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
from arealite.rollout import awaits
from arealite.rollout.episode import Episode, current_episode
from arealite.rollout.prompts import Row
from arealite.rollout.trajectory import check_trajectory

ShouldAccept = Callable[[TensorDict], bool]

BY_WORKFLOW, BY_FILTER, OVERDUE = "workflow", "filter", "overdue"
"""Why an episode is rejected."""


@dataclass(frozen=True)
class Submission:
    """A prompt to run, by what, and who may reject the result."""

    row: Row
    workflow: RolloutWorkflow
    should_accept: ShouldAccept | None = None
    ticket: int | None = None
    """Its entry in the ledger; None is an evaluation, which has none."""
    attempt: int = 0
    first_started_s: float | None = None
    """Time of the event loop when its first attempt began."""

    @property
    def prompt_id(self) -> PromptId:
        """The row's name."""
        prompt_id: PromptId = self.row["prompt_id"]
        return prompt_id


@dataclass(frozen=True)
class FinishedEpisode:
    """An accepted trajectory and where it came from."""

    submission: Submission
    episode: Episode
    trajectory: TensorDict

    @property
    def ticket(self) -> int:
        """Its entry in the ledger."""
        assert self.submission.ticket is not None, f"an evaluation of {self.submission.prompt_id} has no ticket"
        return self.submission.ticket


async def run_attempt(
    engine: InferenceEngine, submission: Submission, episode: Episode, *, oldest_version: int, timeout_s: float
) -> FinishedEpisode | str:
    """Run the workflow once, in the caller's task; return the result, or by whom it was rejected."""
    current_episode.set(episode)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            episode.deadline = deadline
            with awaits.running(str(submission.prompt_id)):
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
        return BY_WORKFLOW
    finished = FinishedEpisode(submission, episode, check_trajectory(trajectory, oldest_version))
    if submission.should_accept is not None and not submission.should_accept(trajectory):
        return BY_FILTER
    return finished


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

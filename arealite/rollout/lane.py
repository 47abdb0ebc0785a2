"""Episodes that staleness does not throttle: a fixed list of prompts, run now, with a concurrency of its own.

Synchronous batches and evaluations take this lane. Invariant: it returns when every episode has ended, so it never
waits for what can't come; an evaluation holds answers of one version of the weights only; no more episodes start than
may run at that moment.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from arealite.api.errors import EpisodeError
from arealite.rollout.attempt import FinishedEpisode, Submission
from arealite.rollout.episode_runner import EpisodeRunner
from arealite.rollout.failures import kind_of

logger = logging.getLogger("arealite.rollout")


class Lane:
    """Runs lists of episodes, in the event loop."""

    def __init__(self, runner: EpisodeRunner, *, max_concurrent: int) -> None:
        self._runner = runner
        self._max_concurrent = max_concurrent
        self._num_running = 0
        self._changed = asyncio.Event()
        """Set and replaced when more may start, or one has failed."""

    def set_max_concurrent(self, max_concurrent: int) -> None:
        """Let so many run from now on; what runs already ends as it may (in the loop)."""
        self._max_concurrent = max_concurrent
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def train_all(self, submissions: list[Submission], *, version: int) -> list[FinishedEpisode]:
        """Run episodes whose accepted results are trained on at this version."""
        ledger = self._runner.ledger
        tickets = ledger.issue([one.prompt_id for one in submissions], cursor=None, is_counted=False)
        ticketed = [dataclasses.replace(one, ticket=ticket) for one, ticket in zip(submissions, tickets)]
        finished = await self._run(ticketed, head_version=version, oldest_version=version)
        ledger.train([one.ticket for one in finished], version)
        return finished

    async def evaluate_all(self, submissions: list[Submission]) -> list[FinishedEpisode]:
        """Run evaluation episodes; those that other weights than the newest answered run again."""
        finished = await self._run(submissions, head_version=0, oldest_version=0)
        versions = [_versions(one) for one in finished]
        newest = max((max(some) for some in versions if some), default=0)
        outdated = [one.submission for one, some in zip(finished, versions) if some - {newest}]
        if not outdated:
            return finished
        logger.warning("%d evaluation episodes saw older weights than %d: they run again", len(outdated), newest)
        again = await self._run(outdated, head_version=newest, oldest_version=newest)
        newer = {version for one in again for version in _versions(one)} - {newest}
        if newer or len(again) < len(outdated):
            raise EpisodeError(
                f"an evaluation must use one version of the weights: got {newest} and {sorted(newer) or 'older ones'}. "
                "Publish weights to every server, and not during an evaluation."
            )
        return [one for one, some in zip(finished, versions) if not some - {newest}] + again

    async def _run(
        self, submissions: list[Submission], *, head_version: int, oldest_version: int
    ) -> list[FinishedEpisode]:
        tasks: list[asyncio.Task[FinishedEpisode | None]] = []
        failed: list[asyncio.Task[FinishedEpisode | None]] = []

        def note_end(task: asyncio.Task[FinishedEpisode | None]) -> None:
            self._num_running -= 1
            if not task.cancelled() and task.exception() is not None:
                failed.append(task)
            self._tell()

        try:
            for submission in submissions:
                while self._num_running >= self._max_concurrent and not failed:
                    await self._changed.wait()
                if failed:
                    break
                self._num_running += 1
                tasks.append(asyncio.create_task(self._run_one(submission, head_version, oldest_version)))
                tasks[-1].add_done_callback(note_end)
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [outcome for outcome in outcomes if outcome is not None]

    async def _run_one(self, submission: Submission, head_version: int, oldest_version: int) -> FinishedEpisode | None:
        """Run one episode to its end."""
        runner = self._runner
        submission = dataclasses.replace(submission, first_started_s=asyncio.get_running_loop().time())
        while True:
            episode = runner.start(submission, head_version)
            outcome = await runner.attempt(submission, episode, oldest_version)
            if not isinstance(outcome, Exception) or not runner.may_retry(submission, outcome):
                break
            if submission.ticket is not None:
                runner.ledger.retry(submission.ticket, kind_of(outcome))
            submission = dataclasses.replace(submission, attempt=submission.attempt + 1)
        runner.note_end(submission, episode, outcome)
        if isinstance(outcome, FinishedEpisode):
            runner.budgets.accept()
            return outcome
        runner.budgets.check()
        return None


def _versions(one: FinishedEpisode) -> set[int]:
    """Return the versions of the weights that sampled tokens of it."""
    return set(one.trajectory["versions"][one.trajectory["loss_mask"].bool()].tolist())

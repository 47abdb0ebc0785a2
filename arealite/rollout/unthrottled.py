"""Batches that staleness does not throttle: a fixed list of prompts, run now, with a concurrency limit of its own.

Synchronous batches and evaluations run here. Invariants: a batch returns when every episode has ended; an evaluation
holds completions of one version of the weights only.
"""

import asyncio
import logging

from arealite.api.errors import EpisodeError
from arealite.rollout.episode import Episode, EpisodeRunner, Keep
from arealite.rollout.prompts import Prompt
from arealite.rollout.staleness import StalenessAccount

logger = logging.getLogger("arealite.rollout")


class UnthrottledBatches:
    def __init__(self, account: StalenessAccount, changed: asyncio.Event) -> None:
        self._account = account  # only for its concurrency limit
        self._changed = changed
        self._num_running = 0
        self._has_failed = False  # whether an episode of the batch has raised, not only failed

    async def train(self, runner: EpisodeRunner, prompts: list[Prompt], version: int) -> list[Episode]:
        """Run episodes whose accepted results are trained on at this version."""
        episodes = await self._run(runner, prompts, head_version=version)
        runner.ledger.train([one.prompt for one in episodes], version)
        return episodes

    async def evaluate(self, runner: EpisodeRunner, prompts: list[Prompt], keep: Keep | None = None) -> list[Episode]:
        """Run evaluation episodes; those that other weights than the newest sampled run again.

        `keep` gets each as soon as it is accepted, with its trajectory, which is then dropped; it judges the weights.
        """
        episodes = await self._run(runner, prompts, head_version=0, keep=keep)
        if keep is not None:
            return episodes
        newest = max((version for one in episodes for version in _versions(one)), default=0)
        outdated = {one: one.prompt for one in episodes if _versions(one) - {newest}}
        if not outdated:
            return episodes
        logger.warning("%d evaluation episodes saw older weights than %d: they run again", len(outdated), newest)
        prompts = [Prompt(one.prompt_id, one.row, one.workflow, attempt=one.attempt) for one in outdated.values()]
        again = await self._run(runner, prompts, head_version=0)
        if others := {version for one in again for version in _versions(one)} - {newest}:
            raise EpisodeError(
                f"an evaluation must use one version of the weights: got {newest} and {sorted(others)}. "
                "Publish weights to every server, and not during an evaluation."
            )
        return [one for one in episodes if one not in outdated] + again

    async def _run(
        self, runner: EpisodeRunner, prompts: list[Prompt], *, head_version: int, keep: Keep | None = None
    ) -> list[Episode]:
        """Return the episodes that were accepted; the first error ends all others."""
        runner.ledger.issue(prompts, cursor=None, is_counted=False)
        tasks: list[asyncio.Task[Episode | None]] = []
        self._has_failed = False
        try:
            for prompt in prompts:
                while self._num_running >= self._account.max_concurrent:
                    await self._changed.wait()
                if self._has_failed:
                    break
                runner.check()
                self._num_running += 1
                tasks.append(asyncio.create_task(_run_to_the_end(runner, prompt, head_version, keep)))
                tasks[-1].add_done_callback(self._forget)
            return [one for one in await asyncio.gather(*tasks) if one is not None]
        finally:
            for task in tasks:
                task.cancel()

    def _forget(self, task: asyncio.Task[Episode | None]) -> None:
        self._num_running -= 1
        self._has_failed |= not task.cancelled() and task.exception() is not None
        self._changed.set()  # wakes those who wait now, not later ones
        self._changed.clear()


async def _run_to_the_end(
    runner: EpisodeRunner, prompt: Prompt, head_version: int, keep: Keep | None
) -> Episode | None:
    """Return the accepted episode; None if it was rejected or failed."""
    while True:
        episode = runner.start(prompt, head_version)
        outcome = await runner.run(episode)
        if not runner.end(episode, outcome):
            break
    if isinstance(outcome, BaseException | str):
        runner.budgets.check()
        return None
    runner.budgets.accept()
    if keep is not None:
        keep(episode)
        del episode.trajectory
    return episode


def _versions(episode: Episode) -> set[int]:
    trajectory = episode.trajectory
    return set(trajectory["versions"][trajectory["loss_mask"].bool()].tolist())

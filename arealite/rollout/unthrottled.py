"""Runs a fixed list of prompts at once, without the staleness bound: synchronous batches and evaluations.

Invariants: a batch returns when every episode has ended; an evaluation has completions of one weight version only.
"""

import asyncio
import logging
from collections.abc import Callable

from arealite.api.errors import EpisodeError, EpisodeTimeoutError
from arealite.rollout.episode import Episode, EpisodeRunner, Keep
from arealite.rollout.prompts import Prompt
from arealite.rollout.staleness import StalenessAccount

logger = logging.getLogger("arealite.rollout")


class UnthrottledBatches:
    def __init__(self, account: StalenessAccount, changed: asyncio.Event, stalled_s: float) -> None:
        """A wait raises after `stalled_s` seconds in which no episode starts or ends."""
        self._account = account  # only for its concurrency limit
        self._changed = changed
        self._stalled_s = stalled_s
        self._num_running = 0
        self._attempts: set[Episode] = set()  # running now

    async def train(self, runner: EpisodeRunner, prompts: list[Prompt], version: int) -> list[Episode]:
        """Run episodes and mark the accepted ones as trained at this version."""
        episodes = await self._run(runner, prompts, head_version=version)
        runner.ledger.train([one.prompt for one in episodes], version)
        return episodes

    async def evaluate(self, runner: EpisodeRunner, prompts: list[Prompt], keep: Keep | None = None) -> list[Episode]:
        """Run evaluation episodes, and repeat those that did not see the newest weights.

        With `keep`, each accepted episode is passed to it and its trajectory is dropped; nothing is repeated.
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
        """Return the accepted episodes; the first error cancels all others."""
        runner.ledger.issue(prompts, cursor=None, is_counted=False)
        tasks: list[asyncio.Task[Episode | None]] = []
        left: set[asyncio.Task[Episode | None]] = set()
        errors: list[BaseException] = []

        def forget(task: asyncio.Task[Episode | None]) -> None:
            self._num_running -= 1
            left.remove(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                errors.append(error)
            self._wake()

        try:
            for prompt in prompts:
                await self._until(lambda: self._num_running < self._account.max_concurrent)
                if errors:
                    break
                runner.check()
                self._num_running += 1
                tasks.append(asyncio.create_task(self._run_to_the_end(runner, prompt, head_version, keep)))
                left.add(tasks[-1])
                tasks[-1].add_done_callback(forget)
            await self._until(lambda: bool(errors) or not left)
            if errors:
                raise errors[0]
            return [one for task in tasks if (one := task.result()) is not None]
        finally:
            for task in tasks:
                task.cancel()

    async def _run_to_the_end(
        self, runner: EpisodeRunner, prompt: Prompt, head_version: int, keep: Keep | None
    ) -> Episode | None:
        """Run a prompt with its retries; return the accepted episode, or None."""
        is_over = False
        while not is_over:
            episode = runner.start(prompt, head_version)
            self._attempts.add(episode)
            try:
                outcome = await runner.run(episode)
            finally:
                self._attempts.remove(episode)
            is_over = not runner.end(episode, outcome)
            self._wake()
        if isinstance(outcome, BaseException | str):
            runner.budgets.check()
            return None
        runner.budgets.accept()
        if keep is not None:
            keep(episode)
            del episode.trajectory
        return episode

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            try:
                async with asyncio.timeout(self._stalled_s):
                    await self._changed.wait()
            except TimeoutError:
                # Requests that wait for a server have their own deadline.
                if not any(one.has_time for one in self._attempts):
                    raise EpisodeTimeoutError(
                        f"an episode must start or end every {self._stalled_s:g} s: got none, with "
                        f"{len(self._attempts)} running. Look at the workflow: its deadline cancels it, which it must "
                        "not catch."
                    ) from None

    def _wake(self) -> None:
        self._changed.set()  # wakes current waits only
        self._changed.clear()


def _versions(episode: Episode) -> set[int]:
    trajectory = episode.trajectory
    return set(trajectory["versions"][trajectory["loss_mask"].bool()].tolist())

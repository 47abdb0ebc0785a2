"""Runs attempts and notes how episodes end: what the executor's account and the lane beside it have in common.

Invariant: every end of an episode reaches the ledger (evaluations are not in it) and the budgets exactly once.
"""

from __future__ import annotations

import asyncio
import logging

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ContextOverflowError
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.attempt import OVERDUE, FinishedEpisode, Submission, run_attempt
from arealite.rollout.episode import Episode
from arealite.rollout.failures import Budgets, describe, kind_of

logger = logging.getLogger("arealite.rollout")

Outcome = FinishedEpisode | str | Exception
"""How an attempt ended: accepted, rejected for a reason, or failed."""


class EpisodeRunner:
    """Runs the user's workflows, in the event loop."""

    def __init__(
        self, config: InferenceEngineConfig, engine: InferenceEngine, *, ledger: Ledger, budgets: Budgets
    ) -> None:
        self.ledger = ledger
        self.budgets = budgets
        self._config = config
        self._engine = engine

    def start(self, submission: Submission, head_version: int) -> Episode:
        """Note the start of an attempt."""
        if submission.ticket is not None:
            self.ledger.start(submission.ticket, attempt=submission.attempt, head_version=head_version)
        return Episode(submission.prompt_id, submission.attempt, head_version, self._config.seed)

    async def attempt(self, submission: Submission, episode: Episode, oldest_version: int) -> Outcome:
        """Run the workflow once; tokens must not be older than `oldest_version`."""
        timeout_s = self._config.episode_timeout
        try:
            return await run_attempt(
                self._engine, submission, episode, oldest_version=oldest_version, timeout_s=timeout_s
            )
        except Exception as error:
            return error

    def note_end(self, submission: Submission, episode: Episode, outcome: Outcome) -> None:
        """Note the end of an episode, except that nothing is accepted for good here."""
        ticket = submission.ticket
        record = episode.samples, asyncio.get_running_loop().time() - (submission.first_started_s or 0.0)
        self.budgets.end(outcome if isinstance(outcome, Exception) else None)
        if isinstance(outcome, Exception):
            if ticket is not None:
                self.ledger.fail(ticket, kind_of(outcome), *record)
        elif isinstance(outcome, str):
            if outcome != OVERDUE:
                self.budgets.reject(outcome)
            if ticket is not None:
                self.ledger.reject(ticket, outcome, *record)
        elif ticket is not None:
            self.ledger.accept(ticket, *record)

    def may_retry(self, submission: Submission, error: Exception) -> bool:
        """Tell whether a fresh attempt may help, and log the failure."""
        may_retry = submission.attempt < self._config.episode_retries and not isinstance(error, ContextOverflowError)
        logger.warning(
            "episode %s failed in attempt %d (%s), %s: %s",
            submission.prompt_id,
            submission.attempt,
            kind_of(error),
            "trying again" if may_retry else "dropped",
            describe(error),
        )
        return may_retry

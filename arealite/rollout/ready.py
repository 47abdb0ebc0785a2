"""Accepted episodes that are in no batch yet: the next batch takes the oldest ones, a filter or age rejects others.

Invariant: an episode leaves as part of one batch or by one rejection, and the ledger records either.
"""

import heapq
from collections.abc import Callable

from arealite.rollout.account.ledger import Ledger
from arealite.rollout.episode import Episode
from arealite.rollout.failures import BY_FILTER, OVERDUE, Budgets
from arealite.rollout.prompts import ShouldAccept
from arealite.rollout.staleness import StalenessAccount


class ReadyEpisodes:
    """Used in the executor's event loop only."""

    def __init__(
        self, account: StalenessAccount, ledger: Ledger, budgets: Budgets, on_rejection: Callable[[], None]
    ) -> None:
        self._account, self._ledger, self._budgets = account, ledger, budgets
        self._on_rejection = on_rejection
        self._episodes: dict[Episode, None] = {}

    def __len__(self) -> int:
        return len(self._episodes)

    def add(self, episode: Episode) -> None:
        """Add an accepted episode; a filter of `wait` may still reject it."""
        self._episodes[episode] = None
        if episode.prompt.should_accept is not None:
            self._budgets.accept()

    def take(self, count: int) -> list[Episode]:
        """Remove and return the `count` oldest episodes, marked as trained at the current version."""
        fresh = [one for one in self._episodes if not self._account.is_overdue(one.head_version)]
        episodes = heapq.nsmallest(count, fresh, key=lambda one: (one.head_version, one.prompt_id))
        for episode in episodes:
            del self._episodes[episode]
        self._ledger.train([one.prompt for one in episodes], self._account.version)
        self._budgets.accept()
        return episodes

    def filter(self, should_accept: ShouldAccept) -> None:
        """Apply the filter of `wait` to episodes that it has not judged yet."""
        unjudged = [one for one in self._episodes if one.prompt.should_accept is None]
        rejected = [one for one in unjudged if not should_accept(one.trajectory)]
        for episode in unjudged:
            episode.prompt.should_accept = should_accept
        self._reject(rejected, BY_FILTER)

    def reject_overdue(self) -> None:
        """Reject episodes that are too old for any batch."""
        self._reject([one for one in self._episodes if self._account.is_overdue(one.head_version)], OVERDUE)

    def _reject(self, episodes: list[Episode], reason: str) -> None:
        for episode in episodes:
            self._ledger.drop(episode.prompt, "rejected", reason)
            self._budgets.reject(reason)
            del self._episodes[episode]
        if episodes:
            self._on_rejection()

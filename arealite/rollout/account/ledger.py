"""What became of every prompt of a run, durably.

    issued -> running -> accepted -> trained(version)
      ^         | | |       |
      |__retry__| | |_______|___> rejected(reason)
                  |_____________> failed(kind)

Each issue of a prompt has a *ticket*, each transition (of one ticket or, `issue` and `train`, of several at once) a
*position*. `rollback` to a position undoes everything that was decided after it, so the history that survives is
one story; until a checkpoint that contains it is noted, `trained` is provisional for that reason.

The ledger alone moves the staleness account: what is durable and what throttles the run can't drift apart. Prompts in
memory are the open ones only. Transitions happen in the event loop and never wait for the disk, unless it is
hopelessly behind (`ledger_file.py`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arealite.api.errors import LedgerError
from arealite.api.io_struct import PromptId
from arealite.rollout.account.ledger_file import LedgerFile, Row
from arealite.rollout.episode import SampleRecord
from arealite.rollout.staleness import StalenessAccount


@dataclass(slots=True)
class _Prompt:
    ticket: int
    prompt_id: PromptId
    is_counted: bool
    issued_at: int
    """Position."""
    issued_unix_s: float
    state: str = "issued"
    reason: str | None = None
    attempt: int = 0
    head_version: int = -1
    """-1 before the first start."""
    trained_version: int | None = None
    latency_s: float | None = None


class Ledger:
    """The states of a run's prompts; with `path` None in memory only."""

    def __init__(self, path: str | None, account: StalenessAccount) -> None:
        self._account = account
        self._file = None if path is None else LedgerFile(path)
        self._position = 0 if self._file is None else self._file.last_position()
        self._has_earlier_story = self._position > 0
        self._open: dict[int, _Prompt] = {}
        self._last_ticket = 0
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Return how many prompts are `issued`, `running`, `accepted`, `trained`, `rejected_<reason>` and
        `failed_<kind>` now, and how many times one was `retried_<kind>`; from any thread."""
        return self._counts.copy()

    # Transitions

    def issue(
        self, prompt_ids: Sequence[PromptId], *, cursor: Mapping[str, Any] | None, is_counted: bool = True
    ) -> list[int]:
        """Give each prompt a ticket, and note the dataloader's state after them.

        `is_counted` False: staleness does not throttle them.
        """
        assert not self._has_earlier_story, "a ledger with an earlier story must be rolled back first, if only to 0"
        now, position = time.time(), self._position + 1
        tickets = range(self._last_ticket + 1, self._last_ticket + 1 + len(prompt_ids))
        prompts = [
            _Prompt(ticket, prompt_id, is_counted, position, now) for ticket, prompt_id in zip(tickets, prompt_ids)
        ]
        self._last_ticket += len(prompts)
        self._open.update((prompt.ticket, prompt) for prompt in prompts)
        self._counts["issued"] += len(prompts)
        self._note(prompts, cursors=() if cursor is None else ((position, json.dumps(cursor)),))
        return list(tickets)

    def start(self, ticket: int, *, attempt: int, head_version: int) -> None:
        """Begin an attempt."""
        prompt = self._find(ticket, "issued")
        prompt.attempt, prompt.head_version = attempt, head_version
        if prompt.is_counted:
            self._account.start(head_version)
        self._change(prompt, "running")

    def retry(self, ticket: int, kind: str) -> None:
        """End an attempt that failed; another will follow."""
        prompt = self._find(ticket, "running")
        if prompt.is_counted:
            self._account.withdraw(prompt.head_version)
        self._counts[f"retried_{kind}"] += 1
        self._change(prompt, "issued", retries=((self._position + 1, ticket, kind),))

    def accept(self, ticket: int, samples: Sequence[SampleRecord], latency_s: float) -> None:
        """End an episode whose trajectory may be trained on."""
        prompt = self._find(ticket, "running")
        if prompt.is_counted:
            self._account.finish(prompt.head_version)
        prompt.latency_s = latency_s
        self._change(prompt, "accepted", samples=_rows(ticket, samples))

    def reject(
        self, ticket: int, reason: str, samples: Sequence[SampleRecord] = (), latency_s: float | None = None
    ) -> None:
        """Drop an episode that someone decided against; of an accepted one samples and latency are known."""
        prompt = self._find(ticket, "running", "accepted")
        if prompt.is_counted:
            withdraw = self._account.withdraw if prompt.state == "running" else self._account.discard
            withdraw(prompt.head_version)
        self._settle(prompt, "rejected", reason, samples, latency_s)

    def fail(
        self, ticket: int, kind: str, samples: Sequence[SampleRecord] = (), latency_s: float | None = None
    ) -> None:
        """Drop an episode that broke for good."""
        prompt = self._find(ticket, "running")
        if prompt.is_counted:
            self._account.withdraw(prompt.head_version)
        self._settle(prompt, "failed", kind, samples, latency_s)

    def train(self, tickets: Sequence[int], version: int) -> None:
        """Hand accepted episodes to the update that turns `version` into the next one."""
        prompts = [self._find(ticket, "accepted") for ticket in tickets]
        assert len(set(tickets)) == len(tickets), f"a batch must hold an episode once: got tickets {list(tickets)}"
        for prompt in prompts:
            if prompt.is_counted:
                self._account.consume(prompt.head_version)
            prompt.trained_version = version
            self._count(prompt, "trained")
            del self._open[prompt.ticket]
        self._note(prompts)

    # Called in the trainer's thread

    def flush(self) -> int:
        """Wait until everything noted so far is on the disk, and return its position."""
        position = self._position
        if self._file is not None:
            self._file.flush(position)
        return position

    def note_checkpoint(self, step: int, position: int) -> None:
        """Tell that a published checkpoint holds the updates of all versions <= `step`, and the story up to there."""
        if self._file is not None:
            self._file.append(position, {"checkpoints": ((step, position),)})

    def check(self) -> None:
        """Raise what went wrong in the writer thread."""
        if self._file is not None:
            self._file.check()

    def close(self) -> None:
        """Write everything and let the file go."""
        if self._file is not None:
            self._file.close()

    def rollback(self, position: int) -> list[tuple[int, PromptId]]:
        """Undo everything after a position; return what is to run again, as issued, in the order of its issue.

        Prompts issued later are forgotten: the dataloader will yield them again. Must come before any transition;
        a run that does not resume rolls back to 0.
        """
        assert not self._open and not self._counts, f"a rollback must come first: got {dict(self._counts)}"
        self._has_earlier_story = False
        if position > self._position:
            raise LedgerError(
                f"the ledger must reach position {position} of the checkpoint: it ends at {self._position}. "
                "Bring back the ledger that belongs to it, or start afresh with recover.mode=disabled."
            )
        if self._file is None:
            return []
        self._file.rollback(position)
        self._last_ticket, self._counts = self._file.read_counts()
        reissued = [_Prompt(*row) for row in self._file.read_issued()]
        self._open = {prompt.ticket: prompt for prompt in reissued}
        return [(prompt.ticket, prompt.prompt_id) for prompt in reissued]

    # Inside

    def _find(self, ticket: int, *states: str) -> _Prompt:
        prompt = self._open.get(ticket)
        state = "settled or unknown" if prompt is None else prompt.state
        assert prompt is not None and state in states, f"ticket {ticket} must be {' or '.join(states)}: it is {state}"
        return prompt

    def _settle(
        self, prompt: _Prompt, state: str, reason: str, samples: Sequence[SampleRecord], latency_s: float | None
    ) -> None:
        prompt.reason = reason
        prompt.latency_s = prompt.latency_s if latency_s is None else latency_s
        self._change(prompt, state, samples=_rows(prompt.ticket, samples))
        del self._open[prompt.ticket]

    def _change(self, prompt: _Prompt, state: str, **rows: Iterable[Row]) -> None:
        self._count(prompt, state)
        self._note((prompt,), **rows)

    def _count(self, prompt: _Prompt, state: str) -> None:
        self._counts[prompt.state] -= 1
        self._counts[f"{state}_{prompt.reason}" if prompt.reason else state] += 1
        prompt.state = state

    def _note(self, prompts: Sequence[_Prompt], **rows: Iterable[Row]) -> None:
        """Give a transition its position and its place in the file."""
        self._position += 1
        if self._file is not None:
            now = time.time()
            changed = [_row(prompt, self._position, now) for prompt in prompts]
            self._file.append(self._position, {"prompts": changed, **rows})


def _row(prompt: _Prompt, changed_at: int, changed_unix_s: float) -> Row:
    return (
        *(prompt.ticket, prompt.prompt_id.epoch, prompt.prompt_id.index, prompt.is_counted, prompt.state),
        *(prompt.reason, prompt.attempt, prompt.head_version, prompt.trained_version, prompt.latency_s),
        *(prompt.issued_at, changed_at, prompt.issued_unix_s, changed_unix_s),
    )


def _rows(ticket: int, samples: Sequence[SampleRecord]) -> list[Row]:
    return [(ticket, one.sample, one.tokens, one.latency_s, one.num_interrupts, one.server) for one in samples]

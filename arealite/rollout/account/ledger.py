"""The durable state of every prompt of a run.

    issued -> running -> accepted -> trained(version)
      ^         | | |       |
      |__retry__| | |_______|___> rejected(reason)
                  |_____________> failed(kind)

Each issue of a prompt has a *ticket*, each transition (of one prompt, or of several by `issue` and `train`) has a
*position*. `rollback` to a position undoes all later transitions, so `trained` is provisional until a checkpoint that
contains it is recorded. Only the ledger moves the staleness account, so that durable states and bound can't diverge.
Transitions happen in the event loop and do not wait for the disk (`ledger_file.py`).
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from arealite.api.errors import LedgerError
from arealite.rollout.account.ledger_file import LedgerFile, Row
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount


class Ledger:
    """The states of a run's prompts; with `path` None in memory only."""

    def __init__(self, path: str | None, account: StalenessAccount) -> None:
        self._account = account
        self._file = None if path is None else LedgerFile(path)
        self._position = 0 if self._file is None else self._file.last_position
        self._has_earlier_history = self._position > 0
        self._last_ticket = 0
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Counts of prompts by state (`issued`, `running`, `accepted`, `trained`, `rejected_<reason>`, `failed_<kind>`)
        and of retries (`retried_<kind>`); may be read from any thread."""
        return self._counts.copy()

    def totals(self) -> dict[str, int]:
        """Return the numbers of prompts that are issued, running, accepted (including trained), rejected and failed."""
        counts = self.counts
        totals = {"issued": counts["issued"], "running": counts["running"]}
        totals["accepted"] = counts["accepted"] + counts["trained"]
        for state in ("rejected", "failed"):
            totals[state] = sum(count for name, count in counts.items() if name.startswith(f"{state}_"))
        return totals

    def causes(self) -> dict[str, int]:
        """Return the counts of rejections, failures and retries by cause."""
        kinds = ("rejected_", "failed_", "retried_")
        return {name: count for name, count in self.counts.items() if name.startswith(kinds) and count}

    @property
    def num_issued(self) -> int:
        """Number of issued tickets, including those before a recovery."""
        return self._last_ticket

    # Transitions

    def issue(self, prompts: Sequence[Prompt], *, cursor: Mapping[str, Any] | None, is_counted: bool = True) -> None:
        """Give each prompt a ticket and record the dataloader's state; the staleness bound applies if `is_counted`."""
        assert not self._has_earlier_history, "call rollback(position) before writing to an existing ledger (0 clears)"
        now, position = time.time(), self._position + 1
        for ticket, prompt in enumerate(prompts, start=self._last_ticket + 1):
            prompt.ticket, prompt.is_counted = ticket, is_counted
            prompt.issued_at, prompt.issued_unix_s = position, now
        self._last_ticket += len(prompts)
        self._counts["issued"] += len(prompts)
        self._write(prompts, cursors=() if cursor is None else ((position, json.dumps(cursor, default=repr)),))

    def start(self, prompt: Prompt, head_version: int) -> None:
        _require(prompt, "issued")
        prompt.head_version = head_version
        self._change([prompt], "running")

    def retry(self, prompt: Prompt, kind: str) -> None:
        """Record a failed attempt that is repeated."""
        _require(prompt, "running")
        self._counts[f"retried_{kind}"] += 1
        self._change([prompt], "issued", retries=((self._position + 1, prompt.ticket, kind),))

    def accept(self, prompt: Prompt, samples: Sequence[SampleRecord], latency_s: float) -> None:
        """Record an episode whose trajectory may be trained on."""
        _require(prompt, "running")
        prompt.latency_s = latency_s
        self._change([prompt], "accepted", samples=_rows(prompt, samples))

    def drop(
        self,
        prompt: Prompt,
        state: Literal["rejected", "failed"],
        reason: str,
        samples: Sequence[SampleRecord] = (),
        latency_s: float | None = None,
    ) -> None:
        """Record the rejection or final failure of an episode; an accepted episode may still be rejected."""
        _require(prompt, "running", *(["accepted"] if state == "rejected" else []))
        prompt.reason = reason
        prompt.latency_s = prompt.latency_s if latency_s is None else latency_s
        self._change([prompt], state, samples=_rows(prompt, samples))

    def train(self, prompts: Sequence[Prompt], version: int) -> None:
        """Record that the update from `version` to the next one trains on accepted episodes."""
        for prompt in prompts:
            _require(prompt, "accepted")
        tickets = [prompt.ticket for prompt in prompts]
        assert len(set(tickets)) == len(tickets), f"a batch must hold an episode once: got tickets {tickets}"
        for prompt in prompts:
            prompt.trained_version = version
        self._change(prompts, "trained")

    # Called in the trainer's thread

    def flush(self) -> int:
        """Wait until all transitions are on disk and return the last position."""
        position = self._position
        if self._file is not None:
            self._file.flush()
        return position

    def note_checkpoint(self, step: int, position: int) -> None:
        """Record a published checkpoint with all updates up to `step` and all transitions up to `position`."""
        if self._file is not None:
            self._file.append(position, {"checkpoints": ((step, position),)})

    def check(self) -> None:
        if self._file is not None:
            self._file.check()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def rollback(self, position: int) -> list[Prompt]:
        """Undo all transitions after a position and return the prompts that must run again, in the order of issue.

        Prompts issued later are removed: the dataloader yields them again. Must precede any transition; a run that does
        not resume rolls back to 0.
        """
        assert not self._counts, f"a rollback must come first: got {dict(self._counts)}"
        self._has_earlier_history = False
        if position > self._position:
            raise LedgerError(
                f"the ledger must reach position {position} of the checkpoint: it ends at {self._position}. "
                "Bring back the ledger that belongs to it, or start afresh with recover.mode=disabled."
            )
        if self._file is None:
            return []
        self._last_ticket, self._counts, issued = self._file.rollback(position)
        return issued

    # Inside

    def _change(self, prompts: Sequence[Prompt], state: str, **rows: Iterable[Row]) -> None:
        for prompt in prompts:
            if prompt.is_counted:
                self._account.move(prompt.head_version, prompt.state, state)
            self._counts[prompt.state] -= 1
            self._counts[f"{state}_{prompt.reason}" if prompt.reason else state] += 1
            prompt.state = state
        self._write(prompts, **rows)

    def _write(self, prompts: Sequence[Prompt], **rows: Iterable[Row]) -> None:
        """Assign a position to a transition and append it to the file."""
        self._position += 1
        if self._file is not None:
            changed = self._position, time.time()
            self._file.append(self._position, {"prompts": [_row(prompt, *changed) for prompt in prompts], **rows})


def _require(prompt: Prompt, *states: str) -> None:
    assert prompt.state in states, f"ticket {prompt.ticket} must be {' or '.join(states)}: it is {prompt.state}"


def _row(prompt: Prompt, changed_at: int, changed_unix_s: float) -> Row:
    return (
        *(prompt.ticket, prompt.prompt_id.epoch, prompt.prompt_id.index, prompt.is_counted, prompt.state),
        *(prompt.reason, prompt.attempt, prompt.head_version, prompt.trained_version, prompt.latency_s),
        *(prompt.issued_at, changed_at, prompt.issued_unix_s, changed_unix_s),
    )


def _rows(prompt: Prompt, samples: Sequence[SampleRecord]) -> list[Row]:
    return [(prompt.ticket, one.sample, one.tokens, one.latency_s, one.num_interrupts, one.server) for one in samples]

"""What became of every prompt of a run, durably.

    issued -> running -> accepted -> trained(version)
      ^         | | |       |
      |__retry__| | |_______|___> rejected(reason)
                  |_____________> failed(kind)

Each issue of a prompt has a *ticket*, each transition (of one prompt or, `issue` and `train`, of several at once) a
*position*. `rollback` to a position undoes what was decided after it, so `trained` is provisional until a checkpoint
that contains it is recorded. The ledger alone moves the staleness account: what is durable and what throttles the run
can't drift apart. Transitions happen in the event loop and do not wait for the disk (`ledger_file.py`).
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
        """How many prompts are `issued`, `running`, `accepted`, `trained`, `rejected_<reason>` and `failed_<kind>` now,
        and how many times one was `retried_<kind>`; from any thread."""
        return self._counts.copy()

    def totals(self) -> dict[str, int]:
        """Return how many prompts are issued, running, accepted (trained ones too), rejected and failed."""
        counts = self.counts
        totals = {"issued": counts["issued"], "running": counts["running"]}
        totals["accepted"] = counts["accepted"] + counts["trained"]
        for state in ("rejected", "failed"):
            totals[state] = sum(count for name, count in counts.items() if name.startswith(f"{state}_"))
        return totals

    def causes(self) -> dict[str, int]:
        """Return why prompts were rejected, failed or tried again."""
        kinds = ("rejected_", "failed_", "retried_")
        return {name: count for name, count in self.counts.items() if name.startswith(kinds) and count}

    @property
    def num_issued(self) -> int:
        """How many tickets were given out, also before a recovery."""
        return self._last_ticket

    # Transitions

    def issue(self, prompts: Sequence[Prompt], *, cursor: Mapping[str, Any] | None, is_counted: bool = True) -> None:
        """Give each prompt a ticket and record the dataloader's state; staleness throttles them if `is_counted`."""
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
        """End an attempt that failed; another will follow."""
        _require(prompt, "running")
        self._counts[f"retried_{kind}"] += 1
        self._change([prompt], "issued", retries=((self._position + 1, prompt.ticket, kind),))

    def accept(self, prompt: Prompt, samples: Sequence[SampleRecord], latency_s: float) -> None:
        """End an episode whose trajectory may be trained on."""
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
        """End an episode that someone decided against or that broke for good; an accepted one may still be rejected."""
        _require(prompt, "running", *(["accepted"] if state == "rejected" else []))
        prompt.reason = reason
        prompt.latency_s = prompt.latency_s if latency_s is None else latency_s
        self._change([prompt], state, samples=_rows(prompt, samples))

    def train(self, prompts: Sequence[Prompt], version: int) -> None:
        """Hand accepted episodes to the update that turns `version` into the next one."""
        for prompt in prompts:
            _require(prompt, "accepted")
        tickets = [prompt.ticket for prompt in prompts]
        assert len(set(tickets)) == len(tickets), f"a batch must hold an episode once: got tickets {tickets}"
        for prompt in prompts:
            prompt.trained_version = version
        self._change(prompts, "trained")

    # Called in the trainer's thread

    def flush(self) -> int:
        """Wait until everything recorded so far is on the disk, and return its position."""
        position = self._position
        if self._file is not None:
            self._file.flush()
        return position

    def note_checkpoint(self, step: int, position: int) -> None:
        """Record that a published checkpoint holds all updates up to `step`, and all transitions up to `position`."""
        if self._file is not None:
            self._file.append(position, {"checkpoints": ((step, position),)})

    def check(self) -> None:
        if self._file is not None:
            self._file.check()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def rollback(self, position: int) -> list[Prompt]:
        """Undo everything after a position; return the prompts that must run again, in the order of their issue.

        Prompts issued later are forgotten: the dataloader will yield them again. Must come before any transition;
        a run that does not resume rolls back to 0.
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
        """Give a transition its position and its place in the file."""
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

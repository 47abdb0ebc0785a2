"""The durable state of every prompt of a run.

    issued -> running -> accepted -> trained(version)
      ^         | | |       |
      |__retry__| | |_______|___> rejected(reason)
                  |_____________> failed(kind)

Each issue of a prompt has a *ticket*, each transition (of one prompt, or of several by `issue` and `train`) has a
*position*. `rollback` to a position undoes all later transitions, so `trained` is provisional until a checkpoint that
contains it is recorded. Only the ledger moves the staleness account, so that durable states and bound can't diverge.
Transitions happen in the event loop and do not wait for the disk.

One thread writes the SQLite file in group commits; readers are concurrent. An event (the rows of one transition, by
table) is written in one transaction, and transactions keep the order of events, so the file always holds a prefix of
them. A commit survives the death of the process, a flush that of the node.
"""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from arealite.api.errors import LedgerError
from arealite.api.io_struct import PromptId
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount
from arealite.utils.files import free_space

Row = tuple[Any, ...]
Event = Mapping[str, Iterable[Row]]

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts(
    ticket INTEGER PRIMARY KEY, epoch INTEGER, idx INTEGER, is_counted INTEGER, state TEXT, reason TEXT,
    attempt INTEGER, head_version INTEGER, trained_version INTEGER, latency_s REAL,
    issued_at INTEGER, changed_at INTEGER, issued_unix_s REAL, changed_unix_s REAL
);
CREATE TABLE IF NOT EXISTS samples(
    ticket INTEGER, sample INTEGER, tokens INTEGER, latency_s REAL, num_interrupts INTEGER, server TEXT,
    PRIMARY KEY (ticket, sample)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retries(position INTEGER PRIMARY KEY, ticket INTEGER, kind TEXT);
CREATE TABLE IF NOT EXISTS cursors(position INTEGER PRIMARY KEY, state TEXT);
CREATE TABLE IF NOT EXISTS checkpoints(step INTEGER PRIMARY KEY, position INTEGER);
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value INTEGER);
"""
OUTCOME = "state || coalesce('_' || reason, '')"  # SQL for `<state>[_<reason>]`
_REDONE = "(changed_at > :position OR state IN ('issued', 'running', 'accepted'))"
_ROLLBACK = (
    f"DELETE FROM samples WHERE ticket IN (SELECT ticket FROM prompts WHERE {_REDONE})",
    "DELETE FROM prompts WHERE issued_at > :position",
    "DELETE FROM retries WHERE position > :position",
    "DELETE FROM cursors WHERE position > :position",
    "DELETE FROM checkpoints WHERE position > :position",
    "UPDATE prompts SET state = 'issued', reason = NULL, attempt = 0, head_version = -1, trained_version = NULL, "
    f"latency_s = NULL, changed_at = issued_at, changed_unix_s = issued_unix_s WHERE {_REDONE}",
)

_GROUP_S = 0.01  # how long a commit waits for more events
_GROUP_EVENTS = 1000  # largest commit: collecting the rows of a larger one would block the event loop
_ROWS_AT_ONCE = 64  # of a statement: one per row would wait for the GIL of a busy event loop each time
_FLUSH_S = 30.0
_LOCK_S = 20.0  # timeout for a lock that another process holds


class Ledger:
    """The states of a run's prompts; with `path` None in memory only."""

    def __init__(self, path: str | None, account: StalenessAccount) -> None:
        self._account = account
        self._file = None if path is None else LedgerFile(path)
        self._position = 0 if self._file is None else self._file.last_position
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
        ends = {
            state: sum(counts[name] for name in counts if name.startswith(state)) for state in ("rejected", "failed")
        }
        return totals | ends

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


class LedgerFile:
    """Appends events to a file that other processes may read at the same time."""

    def __init__(self, path: str) -> None:
        self.path = path = os.path.abspath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._database = _connected(path, "mode=rwc")
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)
            self._database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except sqlite3.Error as error:
            raise _explained(path, error) from error
        query = "SELECT coalesce(max(value), 0) FROM meta WHERE key = 'position'"
        self.last_position: int = self._database.execute(query).fetchone()[0]  # the highest ever written
        # Events, flushes (set once everything before them is written), and None at the end.
        self._queue: SimpleQueue[tuple[int, Event] | threading.Event | None] = SimpleQueue()
        self._error: LedgerError | None = None
        self._thread = threading.Thread(target=self._write_until_closed, name="arealite-ledger", daemon=True)
        self._thread.start()

    def append(self, position: int, event: Event) -> None:
        """Queue the event of a position and return at once."""
        self._queue.put((position, event))

    def flush(self) -> None:
        """Wait until all appended events are on disk."""
        is_written = threading.Event()
        self._queue.put(is_written)
        is_in_time = is_written.wait(_FLUSH_S)
        self.check()
        if not is_in_time:
            raise LedgerError(
                f"{self.path} must take {self._queue.qsize()} events within {_FLUSH_S:g} s: it did not. "
                "Put cluster.fileroot on a faster disk."
            )

    def check(self) -> None:
        if self._error is not None:
            raise LedgerError(str(self._error)) from self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_FLUSH_S)
        if self._thread.is_alive():
            raise LedgerError(f"{self.path} must be closed within {_FLUSH_S:g} s: it was not. Look at the disk.")
        self._database.close()
        self.check()

    def rollback(self, position: int) -> tuple[int, Counter[str], list[Prompt]]:
        """Delete everything after a position and reopen prompts that were open then. Must precede any append.

        Returns the last ticket, the counts of `count_states`, and the reopened prompts in ticket order.
        """
        try:
            with self._database:
                for statement in _ROLLBACK:
                    self._database.execute(statement, {"position": position})
        except sqlite3.Error as error:
            raise _explained(self.path, error) from error
        columns = "epoch, idx, ticket, is_counted, issued_at, issued_unix_s"
        rows = self._database.execute(f"SELECT {columns} FROM prompts WHERE state = 'issued' ORDER BY ticket")
        issued = [
            Prompt(PromptId(epoch, index), ticket=ticket, is_counted=bool(counted), issued_at=at, issued_unix_s=unix_s)
            for epoch, index, ticket, counted, at, unix_s in rows
        ]
        (last_ticket,) = self._database.execute("SELECT coalesce(max(ticket), 0) FROM prompts").fetchone()
        return last_ticket, count_states(self._database), issued

    # The writer thread

    def _write_until_closed(self) -> None:
        items: list[tuple[int, Event] | threading.Event | None] = []
        while None not in items:
            items = [self._queue.get()]
            if isinstance(items[0], tuple) and self._queue.qsize() < _GROUP_EVENTS:
                time.sleep(_GROUP_S)
            items += [self._queue.get() for _ in range(min(self._queue.qsize(), _GROUP_EVENTS))]
            flushes = [item for item in items if isinstance(item, threading.Event)]
            try:
                if self._error is None:
                    if events := [item for item in items if isinstance(item, tuple)]:
                        self._commit(events)
                    if flushes:
                        self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except Exception as error:
                self._error = _explained(self.path, error)
            for flush in flushes:
                flush.set()

    def _commit(self, events: list[tuple[int, Event]]) -> None:
        rows: dict[str, list[Row]] = defaultdict(list)
        for _, event in events:
            for table, changed in event.items():
                rows[table] += changed
        self.last_position = max(self.last_position, *(position for position, _ in events))
        rows["meta"] = [("position", self.last_position)]
        with self._database:
            for table, written in rows.items():
                for start in range(0, len(written), _ROWS_AT_ONCE):
                    part = written[start : start + _ROWS_AT_ONCE]
                    marks = ", ".join([f"({', '.join('?' * len(part[0]))})"] * len(part))
                    values = [value for row in part for value in row]
                    self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES {marks}", values)


@contextlib.contextmanager
def open_for_reading(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Open the ledger of a run, alive or not, read-only; all queries see one snapshot."""
    if not os.path.exists(path):
        raise LedgerError(f"{path} must exist: it does not. Name the folder of a run.")
    # Without a WAL file nobody writes, and a read-only folder must be readable too.
    options = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"
    with contextlib.closing(_connected(path, options)) as database:
        try:
            database.execute("BEGIN")
            yield database
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{path} must be whole: got {error}. Use another copy.") from error


def count_states(database: sqlite3.Connection) -> Counter[str]:
    """Count prompts by `<state>[_<reason>]` and retries by `retried_<kind>`."""
    states = f"SELECT {OUTCOME}, count(*) FROM prompts GROUP BY 1"
    retries = "SELECT 'retried_' || kind, count(*) FROM retries GROUP BY 1"
    return Counter(dict(database.execute(f"{states} UNION ALL {retries}").fetchall()))


def _explained(path: str, error: Exception) -> LedgerError:
    """Return an error that names why the file can't be written: a lock, or the disk."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        message = f"not be locked by another process for {_LOCK_S:g} s: got {error}. Close it, then resume the run."
    else:
        message = f"be writable: got {error}, with {free_space(path)}. Free the disk, then resume the run."
    explained = LedgerError(f"{path} must {message}")
    explained.__cause__ = error
    return explained


def _connected(path: str | os.PathLike[str], options: str) -> sqlite3.Connection:
    """Connect to a ledger; a `with` block on the connection is one transaction."""
    uri = f"{Path(path).absolute().as_uri()}?{options}"
    try:
        database = sqlite3.connect(uri, _LOCK_S, isolation_level="IMMEDIATE", check_same_thread=False, uri=True)
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} must be a ledger that SQLite can open: got {error}. Use another copy.") from error
    if num_tables and version != _SCHEMA_VERSION:
        database.close()
        raise LedgerError(f"{path} must be of version {_SCHEMA_VERSION}: got {version}. Use the release that wrote it.")
    return database

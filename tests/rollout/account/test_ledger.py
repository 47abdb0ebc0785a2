"""The ledger beside a model that replays the story, through rollbacks, kills and full disks."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import testing_forks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from testing_rollouts import write_rows

from arealite.api.errors import LedgerError
from arealite.api.io_struct import PromptId
from arealite.dataset.loader import PromptLoader
from arealite.rollout.account.audit import audit
from arealite.rollout.account.ledger import Ledger, open_for_reading
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount

BATCH = 8
OPEN = ("issued", "running", "accepted")
SAMPLES = st.lists(st.integers(1, 500), max_size=3).map(
    lambda lengths: [SampleRecord(i, tokens, tokens / 10, i, f"127.0.0.1:{i}") for i, tokens in enumerate(lengths)]
)


def new_account() -> StalenessAccount:
    return StalenessAccount(batch_size=2, max_head_offpolicyness=3, max_concurrent=9)


def names(prompts: list[Prompt]) -> list[tuple[int, PromptId]]:
    return [(prompt.ticket, prompt.prompt_id) for prompt in prompts]


@dataclass(frozen=True)
class Fate:
    """What the model knows of one prompt."""

    prompt_id: PromptId
    is_counted: bool
    state: str = "issued"
    reason: str | None = None
    attempt: int = 0
    head_version: int = -1
    trained_version: int | None = None
    latency_s: float | None = None
    samples: tuple[SampleRecord, ...] = ()

    def reopened(self) -> Fate:
        return Fate(self.prompt_id, self.is_counted) if self.state in OPEN else self


@dataclass(frozen=True)
class Story:
    """Everything at one position."""

    fates: dict[int, Fate] = field(default_factory=dict)
    retried: Counter[str] = field(default_factory=Counter)
    cursor: dict | None = None
    loader: dict | None = None
    version: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """The model is the list of all stories by position; a rollback picks one and reopens it."""

    @initialize(batch_size=st.integers(1, 3), size=st.integers(3, 8), drop_last=st.booleans())
    def begin(self, batch_size: int, size: int, drop_last: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = str(self.folder / "ledger.sqlite")
        self.loader = PromptLoader([{}] * size, batch_size, drop_last=drop_last)
        self.prompts = iter(self.loader)
        self.num_unnamed = 0
        self.now = Story(loader=self.loader.state_dict())
        self.position = 0
        self.stories = {0: self.now}
        self.flushed = [0]
        self.checkpoints: dict[int, int] = {}
        self.open()

    def open(self) -> None:
        self.account, self.consumed = new_account(), 0
        self.prompts_by_ticket: dict[int, Prompt] = getattr(self, "prompts_by_ticket", {})
        self.ledger = Ledger(self.path, self.account)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.folder)

    def tickets(self, *states: str) -> list[int]:
        return [ticket for ticket, fate in self.now.fates.items() if fate.state in states]

    def pick(self, data: st.DataObject, *states: str) -> int:
        return data.draw(st.sampled_from(self.tickets(*states)))

    def tell(self, ticket: int | None = None, *, story: Story | None = None, **changes) -> None:
        """Add one transition to the model."""
        self.now = story or replace(self.now, fates={**self.now.fates})
        if ticket is not None:
            self.now.fates[ticket] = replace(self.now.fates[ticket], **changes)
        self.position += 1
        self.stories[self.position] = self.now

    @rule()
    def issue(self) -> None:
        rows = next(self.prompts)
        cursor = self.loader.state_dict()
        prompts = [Prompt(row["prompt_id"]) for row in rows]
        self.ledger.issue(prompts, cursor=cursor)
        tickets = [prompt.ticket for prompt in prompts]
        assert tickets == list(range(len(self.now.fates) + 1, len(self.now.fates) + 1 + len(rows)))
        self.prompts_by_ticket |= dict(zip(tickets, prompts))
        fates = {ticket: Fate(row["prompt_id"], True) for ticket, row in zip(tickets, rows)}
        self.tell(story=replace(self.now, fates=self.now.fates | fates, cursor=cursor, loader=cursor))

    @rule()
    def issue_beside_the_account(self) -> None:
        prompt_id = PromptId(-1, self.num_unnamed)
        self.num_unnamed += 1
        prompt = Prompt(prompt_id)
        self.ledger.issue([prompt], cursor=None, is_counted=False)
        self.prompts_by_ticket[prompt.ticket] = prompt
        self.tell(story=replace(self.now, fates=self.now.fates | {prompt.ticket: Fate(prompt_id, False)}))

    @precondition(lambda self: self.tickets("issued"))
    @rule(data=st.data(), attempt=st.integers(0, 2), head_version=st.integers(0, 2))
    def start(self, data: st.DataObject, attempt: int, head_version: int) -> None:
        ticket = self.pick(data, "issued")
        self.prompts_by_ticket[ticket].attempt = attempt
        self.ledger.start(self.prompts_by_ticket[ticket], head_version)
        self.tell(ticket, state="running", attempt=attempt, head_version=head_version)

    @precondition(lambda self: self.tickets("running"))
    @rule(data=st.data(), kind=st.sampled_from(["timeout", "reward_crash"]))
    def retry(self, data: st.DataObject, kind: str) -> None:
        ticket = self.pick(data, "running")
        self.ledger.retry(self.prompts_by_ticket[ticket], kind)
        self.now = replace(self.now, retried=self.now.retried + Counter([kind]))
        self.tell(ticket, state="issued")

    @precondition(lambda self: self.tickets("running"))
    @rule(data=st.data(), samples=SAMPLES, latency_s=st.floats(0, 9))
    def accept(self, data: st.DataObject, samples: list[SampleRecord], latency_s: float) -> None:
        ticket = self.pick(data, "running")
        self.ledger.accept(self.prompts_by_ticket[ticket], samples, latency_s)
        self.tell(ticket, state="accepted", latency_s=latency_s, samples=tuple(samples))

    @precondition(lambda self: self.tickets("running"))
    @rule(data=st.data(), samples=SAMPLES, latency_s=st.none() | st.floats(0, 9), is_failure=st.booleans())
    def drop(self, data: st.DataObject, samples: list[SampleRecord], latency_s: float | None, is_failure: bool) -> None:
        ticket = self.pick(data, "running")
        state = "failed" if is_failure else "rejected"
        self.ledger.drop(self.prompts_by_ticket[ticket], state, "parse", samples, latency_s)
        self.tell(ticket, state=state, reason="parse", latency_s=latency_s, samples=tuple(samples))

    @precondition(lambda self: self.tickets("accepted"))
    @rule(data=st.data())
    def reject_accepted(self, data: st.DataObject) -> None:
        ticket = self.pick(data, "accepted")
        self.ledger.drop(self.prompts_by_ticket[ticket], "rejected", "overdue")
        self.tell(ticket, state="rejected", reason="overdue")

    @precondition(lambda self: self.tickets("accepted"))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        tickets = data.draw(st.lists(st.sampled_from(self.tickets("accepted")), unique=True, min_size=1))
        version = self.now.version
        self.ledger.train([self.prompts_by_ticket[ticket] for ticket in tickets], version)
        fates = {t: replace(self.now.fates[t], state="trained", trained_version=version) for t in tickets}
        self.consumed += sum(fate.is_counted for fate in fates.values())
        self.tell(story=replace(self.now, fates=self.now.fates | fates, version=version + 1))

    @precondition(lambda self: self.now.fates)
    @rule(data=st.data())
    def illegal_transitions_are_refused(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.now.fates)))
        prompt, state = self.prompts_by_ticket[ticket], self.now.fates[ticket].state
        attempts = {
            "issued": lambda: self.ledger.start(prompt, 0),
            "running": lambda: self.ledger.accept(prompt, [], 0.0),
            "accepted": lambda: self.ledger.train([prompt], 0),
        }
        for needed, attempt in attempts.items():
            if needed != state:
                with pytest.raises(AssertionError, match=f"ticket {ticket} must be {needed}: it is "):
                    attempt()

    @rule()
    def flush(self) -> None:
        assert self.ledger.flush() == self.position
        if self.position not in self.flushed:
            self.flushed.append(self.position)

    @precondition(lambda self: self.now.version)
    @rule()
    def checkpoint(self) -> None:
        self.flush()
        self.ledger.note_checkpoint(self.now.version - 1, self.position)
        self.checkpoints[self.now.version - 1] = self.position

    @rule(data=st.data(), again=st.booleans())
    def rollback(self, data: st.DataObject, again: bool) -> None:
        self.ledger.close()
        self.open()
        position = data.draw(st.sampled_from(self.flushed))
        pending = self.ledger.rollback(position)
        if again:
            self.ledger.close()
            self.open()
            assert names(self.ledger.rollback(position)) == names(pending)
        self.prompts_by_ticket |= {prompt.ticket: prompt for prompt in pending}
        self.now = self.stories[position]
        self.now = replace(self.now, fates={ticket: fate.reopened() for ticket, fate in self.now.fates.items()})
        assert names(pending) == [(ticket, self.now.fates[ticket].prompt_id) for ticket in self.tickets("issued")]
        self.stories = {at: story for at, story in self.stories.items() if at < position} | {position: self.now}
        self.stories[self.position] = self.now
        self.flushed = [at for at in self.flushed if at <= position]
        self.checkpoints = {step: at for step, at in self.checkpoints.items() if at <= position}
        self.loader.load_state_dict(self.now.loader)

    @rule(data=st.data())
    def audit(self, data: st.DataObject) -> None:
        self.ledger.flush()
        trained = self.tickets("trained")
        self.write_rollouts(trained)
        found = audit(self.folder)
        counts = Counter(fate.state for fate in self.now.fates.values())
        assert (found.issued, found.trained) == (len(self.now.fates), counts["trained"])
        assert (found.rejected, found.failed) == (counts["rejected"], counts["failed"])
        assert found.pending == sum(counts[state] for state in OPEN) and found.adds_up
        newest = max(self.checkpoints, default=-1)
        assert found.provisional == sum(self.now.fates[ticket].trained_version > newest for ticket in trained)
        assert (found.lost, found.repeated) == (None if self.now.cursor is None else 0, 0)
        from_loader = [ticket for ticket in trained if self.now.fates[ticket].is_counted]
        if from_loader:
            forgotten = data.draw(st.sampled_from(from_loader))
            self.write_rollouts([ticket for ticket in trained if ticket != forgotten])
            assert audit(self.folder).lost_ids == [str(self.now.fates[forgotten].prompt_id)]

    def write_rollouts(self, tickets: list[int]) -> None:
        shutil.rmtree(self.folder / "rollouts", ignore_errors=True)
        (self.folder / "rollouts").mkdir()
        for ticket in tickets:
            fate = self.now.fates[ticket]
            rows = [{"prompt_id": str(fate.prompt_id), "row": n} for n in range(2)]
            write_rows(self.folder / "rollouts" / f"step_{fate.trained_version}", rows)

    @rule()
    def compare_the_file(self) -> None:
        self.ledger.flush()
        columns = "epoch, idx, is_counted, state, reason, attempt, head_version, trained_version, latency_s"
        sample_columns = "ticket, sample, tokens, samples.latency_s, num_interrupts, server, state"
        with open_for_reading(self.path) as database:
            rows = {ticket: row for ticket, *row in database.execute(f"SELECT ticket, {columns} FROM prompts")}
            query = f"SELECT {sample_columns} FROM samples JOIN prompts USING (ticket)"
            samples = database.execute(query).fetchall()
        fates = self.now.fates
        assert rows == {
            ticket: [
                *(fate.prompt_id.epoch, fate.prompt_id.index, fate.is_counted, fate.state, fate.reason, fate.attempt),
                *(fate.head_version, fate.trained_version, fate.latency_s),
            ]
            for ticket, fate in fates.items()
        }
        assert sorted(samples) == [
            (ticket, one.sample, one.tokens, one.latency_s, one.num_interrupts, one.server, fate.state)
            for ticket, fate in sorted(fates.items())
            for one in fate.samples
        ]

    @invariant()
    def counts_and_account_agree(self) -> None:
        if not hasattr(self, "now"):
            return
        fates = self.now.fates.values()
        expected = Counter(f"{fate.state}_{fate.reason}" if fate.reason else fate.state for fate in fates)
        expected.update({f"retried_{kind}": count for kind, count in self.now.retried.items()})
        assert self.ledger.counts == expected
        heads = [(fate.state, fate.head_version) for fate in fates if fate.is_counted]
        assert self.account.running == Counter(head for state, head in heads if state == "running")
        assert self.account.ready == Counter(head for state, head in heads if state == "accepted")
        assert self.account.consumed == self.consumed


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40)


def test_a_batch_is_trained_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    account = new_account()
    ledger = Ledger(None, account)
    prompts = [Prompt(PromptId(0, 0)), Prompt(PromptId(0, 1))]
    ledger.issue(prompts, cursor=None)
    ledger.start(prompts[0], 0)
    ledger.accept(prompts[0], [], 0.1)
    with pytest.raises(AssertionError, match="ticket 2 must be accepted: it is issued"):
        ledger.train(prompts, 0)
    with pytest.raises(AssertionError, match=r"hold an episode once: got tickets \[1, 1\]"):
        ledger.train([prompts[0], prompts[0]], 0)
    assert ledger.counts == Counter(accepted=1, issued=1) and account.consumed == 0
    assert ledger.flush() == 3 and list(tmp_path.iterdir()) == []


def test_readers_see_a_transition_soon_without_a_flush(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "ledger.sqlite"), new_account())
    for index in range(20):
        ledger.issue([Prompt(PromptId(0, index))], cursor=None)
        deadline = time.monotonic() + 120
        while audit(tmp_path).issued <= index:
            assert time.monotonic() < deadline, f"transition {index} is not in the file"
            time.sleep(0.001)
    ledger.close()


def test_a_position_the_file_does_not_reach_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "ledger.sqlite"), new_account())
    with pytest.raises(LedgerError, match="must reach position 5 of the checkpoint: it ends at 0"):
        ledger.rollback(5)
    ledger.close()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("no database at all, but quite a long text instead" * 100)
    with pytest.raises(LedgerError, match="must be a ledger that SQLite can open"):
        Ledger(str(path), new_account())
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE other(x)")
    database.close()
    with pytest.raises(LedgerError, match="must be of version 1: got 0"):
        Ledger(str(path), new_account())


def write_until_killed(pipe: Connection, path: str, seed: int) -> None:
    """Say after each flush what the ledger holds."""
    rng = random.Random(seed)
    account = StalenessAccount(batch_size=BATCH, max_head_offpolicyness=10**9, max_concurrent=10**9)
    ledger = Ledger(path, account)
    ledger.rollback(0)
    issued, version, ready = 0, 0, []
    while True:
        prompts = [Prompt(PromptId(0, issued + offset)) for offset in range(BATCH)]
        issued += BATCH
        ledger.issue(prompts, cursor={"position": issued})
        for prompt in prompts:
            if rng.random() < 0.9:
                ledger.start(prompt, head_version=version)
                ready += end_some(ledger, rng, prompt)
        if len(ready) >= BATCH:
            ledger.train(ready[:BATCH], version)
            ready, version = ready[BATCH:], version + 1
        if rng.random() < 0.05:
            pipe.send({"position": ledger.flush(), "issued": issued, "counts": dict(ledger.counts)})


def end_some(ledger: Ledger, rng: random.Random, prompt: Prompt) -> list[Prompt]:
    """End an episode, or leave it running; return what may be trained on."""
    samples = [SampleRecord(sample, 10 + sample, 0.5, 0, "127.0.0.1:1") for sample in range(3)]
    outcome = rng.random()
    if outcome < 0.1:
        ledger.drop(prompt, "failed", "timeout", samples, 0.5)
    elif outcome < 0.2:
        ledger.retry(prompt, "server_error")
    elif outcome < 0.9:
        ledger.accept(prompt, samples, 0.5)
        return [prompt]
    return []


def test_kill_at_any_moment_keeps_what_was_flushed(tmp_path: Path) -> None:
    rng, path = random.Random(5), tmp_path / "ledger.sqlite"
    for seed in range(4):
        with testing_forks.connected(write_until_killed, str(path), seed) as writer:
            for _ in range(rng.randrange(1, 8)):
                told = writer.receive()
            time.sleep(rng.uniform(0, 0.3))
            writer.process.kill()
            with contextlib.suppress(EOFError):
                while True:
                    told = writer.pipe.recv()
        check_killed(path, told)


def check_killed(path: Path, told: dict) -> None:
    """Look at the file as the kill left it, then as a recovery leaves it."""
    with open_for_reading(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (last,) = database.execute("SELECT value FROM meta WHERE key = 'position'").fetchone()
        (issued,) = database.execute("SELECT max(ticket) FROM prompts").fetchone()
        assert last >= told["position"] and issued >= told["issued"]
        cursor = database.execute("SELECT state FROM cursors ORDER BY position DESC LIMIT 1").fetchone()[0]
        assert json.loads(cursor) == {"position": issued}, "prompts and cursor were written together"
        sizes = database.execute(
            "SELECT count(*) FROM prompts WHERE state = 'trained' GROUP BY trained_version"
        ).fetchall()
        assert set(sizes) == {(BATCH,)}, "batches are whole"
    ledger = Ledger(str(path), new_account())
    pending = ledger.rollback(told["position"])
    counts = Counter(told["counts"])
    num_open = sum(counts.pop(state, 0) for state in OPEN)
    assert ledger.counts == counts + Counter(issued=num_open) and len(pending) == num_open
    ledger.close()


def fill_the_disk(pipe: Connection, path: str, num_bytes: int) -> None:
    """Write a ledger to a disk with room for so many bytes, and report what each call says then."""
    if not num_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        ledger = Ledger(path, new_account())
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        while True:
            ledger.issue([Prompt(PromptId(0, 0)) for _ in range(100)], cursor=None)
            ledger.flush()
    except LedgerError as error:
        told = [str(error)]
    for call in (ledger.check, ledger.flush, ledger.close) if num_bytes else ():
        with pytest.raises(LedgerError) as caught:
            call()
        told.append(str(caught.value))
    pipe.send(told)


@pytest.mark.parametrize(("num_bytes", "num_told"), [(400_000, 4), (0, 1)])
def test_a_full_disk_surfaces(tmp_path: Path, num_bytes: int, num_told: int) -> None:
    path = tmp_path / "ledger.sqlite"
    with testing_forks.connected(fill_the_disk, str(path), num_bytes) as writer:
        told = writer.receive()
    rule = rf"{path} must be writable: got .*, with .* free in {tmp_path}. Free the disk"
    assert len(told) == num_told and all(re.match(rule, one) for one in told), told
    if num_bytes:
        found = audit(tmp_path)
        assert found.issued == found.pending > 0 and found.adds_up


def test_a_lock_of_another_is_an_error_of_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arealite.rollout.account.ledger._LOCK_S", 0.5)
    path = tmp_path / "ledger.sqlite"
    ledger, refusal = Ledger(str(path), new_account()), rf"{path} must not be locked by another process for 0.5 s"
    ledger.flush()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match=refusal):
            ledger.rollback(0)
        ledger.issue([Prompt(PromptId(0, 0))], cursor=None)
        with pytest.raises(LedgerError, match=refusal):
            ledger.flush()
    with pytest.raises(LedgerError, match=refusal):
        ledger.close()


def test_a_ledger_stays_where_it_is_when_the_script_changes_its_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("ledger.sqlite", new_account())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    ledger.flush()
    ledger.close()

"""The account keeps its promise under any timing: simulated runs with stragglers, failures, retries and rejections."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.rollout.staleness import StalenessAccount

Rule = Callable[[StalenessAccount], bool]
Batch = list[tuple[int, int, int]]


@dataclass
class Simulation:
    """Virtual time: episodes of random length on servers that switch versions one by one, and a trainer."""

    rng: random.Random
    account: StalenessAccount
    rule: Rule
    straggler_share: float
    num_servers: int = 3
    now: float = 0.0
    staleness: list[int] = field(default_factory=list)
    ready: Batch = field(default_factory=list)
    """Head version, number, oldest version of a token."""

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ids = itertools.count()
        self.server_versions = [self.account.version] * self.num_servers

    @property
    def version(self) -> int:
        return self.account.version

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.ids), action))

    def admit(self) -> None:
        while self.account.capacity() > 0:
            self.start(next(self.ids), attempt=0)

    def start(self, number: int, attempt: int) -> None:
        head, server = self.version, self.rng.randrange(self.num_servers)
        oldest = self.server_versions[server]
        self.account.move(head, "issued", "running")
        is_straggler = self.rng.random() < self.straggler_share
        delay = self.rng.uniform(5, 60) if is_straggler else self.rng.uniform(0, 2)
        self.later(delay, lambda: self.end(number, attempt, head, oldest))

    def end(self, number: int, attempt: int, head: int, oldest: int) -> None:
        outcome = self.rng.random()
        if outcome < 0.1 and attempt == 0:
            self.account.move(head, "running", "failed")
            self.start(number, attempt=1)
        elif outcome < 0.25:
            self.account.move(head, "running", "failed")
        else:
            self.account.move(head, "running", "accepted")
            self.ready.append((head, number, oldest))
        self.admit()

    def run(self, num_steps: int) -> list[int]:
        """Train `num_steps` batches and return the staleness of everything trained."""
        for _ in range(num_steps):
            self.admit()
            while not self.rule(self.account):
                self.step()
            for head, _, oldest in self.take():
                self.account.move(head, "accepted", "trained")
                self.staleness.append(self.version - oldest)
            self.admit()
            self.pass_time(self.rng.choice([0.0, 1.0, 20.0]))
            for server in self.rng.sample(range(self.num_servers), self.num_servers):
                self.server_versions[server] = self.version + 1
                self.pass_time(self.rng.uniform(0, 1))
            self.account.set_version(self.version + 1)
        return self.staleness

    def take(self) -> Batch:
        self.ready.sort()
        batch, self.ready = self.ready[: self.account.batch_size], self.ready[self.account.batch_size :]
        return batch

    def step(self) -> None:
        assert self.events, "nothing runs and the batch can't be taken: a deadlock"
        self.now, _, action = heapq.heappop(self.events)
        action()

    def pass_time(self, duration: float) -> None:
        until = self.now + duration
        while self.events and self.events[0][0] <= until:
            self.step()
        self.now = until


def ours(account: StalenessAccount) -> bool:
    return account.can_take(account.batch_size)


def wait_for_the_overdue_only(account: StalenessAccount) -> bool:
    oldest_allowed = account.version - account.max_head_offpolicyness
    return account.ready.total() >= account.batch_size and all(head > oldest_allowed for head in account.running)


def capacity_only(account: StalenessAccount) -> bool:
    return account.ready.total() >= account.batch_size


def simulated(
    rule: Rule,
    seed: int,
    *,
    eta: int,
    batch_size: int,
    max_concurrent: int,
    straggler_share: float,
    version: int = 0,
) -> list[int]:
    account = StalenessAccount(
        batch_size=batch_size, max_head_offpolicyness=eta, max_concurrent=max_concurrent, version=version
    )
    return Simulation(random.Random(seed), account, rule, straggler_share).run(20)


@given(
    seed=st.integers(0, 2**32),
    eta=st.integers(0, 5),
    batch_size=st.integers(1, 6),
    max_concurrent=st.integers(1, 40),
    straggler_share=st.sampled_from([0.0, 0.05, 0.5]),
    version=st.sampled_from([0, 7]),
)
def test_no_trained_token_is_older_than_the_bound(
    seed: int, eta: int, batch_size: int, max_concurrent: int, straggler_share: float, version: int
) -> None:
    staleness = simulated(
        ours,
        seed,
        eta=eta,
        batch_size=batch_size,
        max_concurrent=max_concurrent,
        straggler_share=straggler_share,
        version=version,
    )
    assert len(staleness) == 20 * batch_size
    assert max(staleness) <= eta


@pytest.mark.parametrize("rule", [wait_for_the_overdue_only, capacity_only])
def test_weaker_rules_break_the_bound(rule: Rule) -> None:
    """Once many episodes are due at the same version, one batch can't hold them all."""
    worst = max(
        max(simulated(rule, seed, eta=2, batch_size=4, max_concurrent=40, straggler_share=0.5)) for seed in range(20)
    )
    assert worst > 2


def test_more_than_a_batch_may_be_due_at_once() -> None:
    """eta 2, batch 2: at version 1 with 4 of head 0 running, this batch must hold two of them."""
    account = StalenessAccount(batch_size=2, max_head_offpolicyness=2, max_concurrent=100)
    for _ in range(6):
        account.move(0, "issued", "running")
    for _ in range(2):
        account.move(0, "running", "accepted")
    assert account.can_take(2)  # the other 4 fit into versions 1 and 2
    for _ in range(2):
        account.move(0, "accepted", "trained")
    account.set_version(1)
    for _ in range(2):
        account.move(1, "issued", "running")
        account.move(1, "running", "accepted")
    assert account.ready == {1: 2} and account.running == {0: 4}
    assert not account.can_take(2)  # else 4 of head 0 would remain for version 2 alone
    account.move(0, "running", "accepted")
    assert not account.can_take(2)
    account.move(0, "running", "accepted")
    assert account.can_take(2)


def test_capacity_by_hand() -> None:
    account = StalenessAccount(batch_size=4, max_head_offpolicyness=2, max_concurrent=5)
    assert account.room() == 12 and account.capacity() == 5
    for _ in range(5):
        account.move(0, "issued", "running")
    assert account.room() == 7 and account.capacity() == 0
    account.move(0, "running", "accepted")
    account.move(0, "running", "failed")  # rejected: leaves the account
    assert account.room() == 8 and account.capacity() == 2
    account.move(0, "accepted", "trained")
    assert account.room() == 8  # consumed still counts as accepted


@pytest.mark.parametrize("is_known_at_start", [True, False])
def test_capacity_after_recovery(is_known_at_start: bool) -> None:
    """A process that starts at version 10 has consumed nothing itself; its first batch is the run's 11th."""
    version = 10 if is_known_at_start else 0
    account = StalenessAccount(batch_size=4, max_head_offpolicyness=2, max_concurrent=100, version=version)
    account.set_version(10)
    assert account.capacity() == 12
    for _ in range(4):
        account.move(10, "issued", "running")
        account.move(10, "running", "accepted")
        account.move(10, "accepted", "trained")
    assert account.capacity() == 8


def test_overdue() -> None:
    account = StalenessAccount(batch_size=1, max_head_offpolicyness=2, max_concurrent=1, version=5)
    assert [account.is_overdue(head) for head in (2, 3, 5)] == [True, False, False]

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.utils.frequency import Frequency

EPOCH_STEPS = 4


@dataclass
class Triggers:
    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: float | None = None


@given(st.integers(1, 7), st.integers(0, 40))
def test_every_nth_step(n: int, num_steps: int) -> None:
    frequency = Frequency(Triggers(freq_steps=n), EPOCH_STEPS)
    due = [step for step in range(1, num_steps + 1) if frequency.check()]
    assert due == list(range(n, num_steps + 1, n))


def test_an_epoch_is_its_steps_and_the_shorter_trigger_wins() -> None:
    frequency = Frequency(Triggers(freq_epochs=2, freq_steps=100), EPOCH_STEPS)
    assert [step for step in range(1, 18) if frequency.check()] == [8, 16]


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr("arealite.utils.frequency.time", one)
    return one


def test_seconds(clock: Clock) -> None:
    frequency = Frequency(Triggers(freq_secs=5), EPOCH_STEPS)
    assert not frequency.check()
    clock.now_s += 6
    assert [frequency.check(), frequency.check()] == [True, False]


@given(st.integers(1, 5), st.booleans(), st.integers(0, 12), st.integers(0, 12))
def test_goes_on_from_a_state(n: int, is_first_due: bool, before: int, after: int) -> None:
    whole = Frequency(Triggers(freq_steps=n), EPOCH_STEPS, is_first_due=is_first_due)
    expected = [whole.check() for _ in range(before + after)]
    first = Frequency(Triggers(freq_steps=n), EPOCH_STEPS, is_first_due=is_first_due)
    found = [first.check() for _ in range(before)]
    second = Frequency(Triggers(freq_steps=n), EPOCH_STEPS, is_first_due=is_first_due)
    second.load_state_dict(first.state_dict())
    assert found + [second.check() for _ in range(after)] == expected

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.utils.stats import StatsTracker, reduction_of

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_each_kind_reduces_all_values_of_a_step(values: list[float]) -> None:
    tracker = StatsTracker()
    for value in values:
        for kind in ("mean", "sum", "min", "max"):
            tracker.add({f"group/{kind}_of": value}, reduce=kind)
    row = tracker.collect()
    assert row["group/mean_of"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert row["group/sum_of"] == pytest.approx(sum(values), abs=1e-6)
    assert (row["group/min_of"], row["group/max_of"]) == (min(values), max(values))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("staleness/max", "max"),
        ("reward/min", "min"),
        ("a/length_max", "max"),
        ("reward/mean", "mean"),
        ("max/x", "mean"),
    ],
)
def test_the_last_word_of_a_key_says_how_it_reduces(key: str, kind: str) -> None:
    assert reduction_of(key) == kind


def test_nan_is_not_lost_in_a_minimum_or_maximum() -> None:
    tracker = StatsTracker()
    for value in (1.0, math.nan, 2.0):
        tracker.add({"a/min": value, "a/max": value, "a/mean": value})
    row = tracker.collect()
    assert all(math.isnan(row[key]) for key in ("a/min", "a/max", "a/mean"))


def test_one_metric_keeps_one_reduction() -> None:
    tracker = StatsTracker()
    tracker.add({"a/b": 1.0})
    with pytest.raises(ValueError, match="metric a/b must keep one reduction: got mean and sum"):
        tracker.add({"a/b": 1.0}, reduce="sum")


def test_timers_add_up_and_survive_errors() -> None:
    tracker = StatsTracker()
    for _ in range(2):
        with tracker.timer("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), tracker.timer("update"):
        raise KeyError
    row = tracker.collect()
    assert row["time/rollout_s"] >= 0.04
    assert row["time/update_s"] >= 0
    assert row["time/step_s"] >= row["time/rollout_s"] + row["time/update_s"]


def test_a_step_reaches_from_the_end_of_the_one_before() -> None:
    tracker = StatsTracker()
    time.sleep(0.1)  # before the first use: loading, not a step
    began = time.perf_counter()
    with tracker.timer("rollout"):
        pass
    assert tracker.collect()["time/step_s"] <= time.perf_counter() - began
    time.sleep(0.1)
    assert tracker.collect()["time/step_s"] >= 0.1

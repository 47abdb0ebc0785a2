"""What is left of the curve of a long run."""

import pytest

from arealite.viewer.charts import chart
from arealite.viewer.thin import MAX_POINTS, thinned

NUM_STEPS = 100_000


def curve(**values: float | None) -> dict:
    ys: list[float | None] = [float(step % 7) for step in range(NUM_STEPS)]
    for step, value in values.items():
        ys[int(step.removeprefix("at_"))] = value
    return {"type": "scatter", "x": [*range(NUM_STEPS)], "y": ys}


def test_spikes_and_ends_stay() -> None:
    found = thinned(curve(at_0=2.5, at_43210=99.0, at_43211=-99.0, at_99999=3.5))
    points = dict(zip(found["x"], found["y"]))
    assert len(points) <= MAX_POINTS + 2
    assert (points[0], points[43210], points[43211], points[99999]) == (2.5, 99.0, -99.0, 3.5)
    assert found["x"] == sorted(found["x"])
    assert {min(found["y"][1:-1]), max(found["y"][1:-1])} == {-99.0, 99.0}


def test_a_gap_stays_and_nulls_beside_numbers_hide_none() -> None:
    gap = {f"at_{step}": None for step in range(50_000, 51_000)}
    found = thinned(curve(**gap, at_20=None))
    assert any(step in range(50_000, 51_000) and y is None for step, y in zip(found["x"], found["y"]))
    assert [y for step, y in zip(found["x"], found["y"]) if step < 100][:2] != [None, None]


def test_bars_become_the_mean_of_their_bucket() -> None:
    found = thinned(curve() | {"type": "bar"})
    assert len(found["y"]) == MAX_POINTS // 2 and found["x"][1] == 100
    assert found["y"][0] == pytest.approx(sum(step % 7 for step in range(100)) / 100)


def test_intervals_keep_to_their_points_and_short_curves_are_left_alone() -> None:
    error = {"type": "data", "array": [*range(NUM_STEPS)], "arrayminus": [*range(NUM_STEPS)]}
    found = thinned(curve() | {"error_y": error})
    assert found["error_y"]["array"] == found["error_y"]["arrayminus"] == found["x"]
    assert thinned(short := {"type": "scatter", "x": [0, 1], "y": [1.0, None]}) is short


def test_every_chart_has_thinned_traces() -> None:
    trace = curve(at_43210=99.0)
    assert chart("Reward", [trace, trace])["traces"] == [thinned(trace)] * 2

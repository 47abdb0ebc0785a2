"""The charts of a run, from rows of metrics."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.viewer.charts import MAX_POINTS, charts, thinned

NUM_STEPS = 100_000


def curve(**values: float | None) -> dict[str, Any]:
    ys: list[float | None] = [float(step % 7) for step in range(NUM_STEPS)]
    for step, value in values.items():
        ys[int(step.removeprefix("at_"))] = value
    return {"type": "scatter", "x": [*range(NUM_STEPS)], "y": ys}


def test_spikes_ends_and_gaps_of_a_long_curve_stay() -> None:
    gap = {f"at_{step}": None for step in range(50_000, 51_000)}
    points = thinned(curve(at_0=2.5, at_43210=99.0, at_43211=-99.0, at_99999=3.5, at_20=None, **gap))
    by_step = dict(zip(points["x"], points["y"]))
    assert len(by_step) <= MAX_POINTS + 2 and points["x"] == sorted(points["x"])
    assert (by_step[0], by_step[43210], by_step[43211], by_step[99999]) == (2.5, 99.0, -99.0, 3.5)
    assert any(step in range(50_000, 51_000) and y is None for step, y in by_step.items())
    assert [y for step, y in by_step.items() if step < 100][:2] != [None, None], "a null beside numbers hides none"


def test_bars_become_the_mean_of_their_bucket() -> None:
    bars = thinned(curve() | {"type": "bar"})
    assert len(bars["y"]) == MAX_POINTS // 2 and bars["x"][1] == 100
    assert bars["y"][0] == pytest.approx(sum(step % 7 for step in range(100)) / 100)


def test_phases_and_other_add_up_to_the_step() -> None:
    rows = [{"step": 0, "time/update_s": 1.0, "time/rollout_s": 2.0, "time/step_s": 3.5}]
    (chart,) = charts(rows, staleness_bound=None)
    assert [(trace["name"], trace["y"]) for trace in chart["traces"]] == [
        ("rollout", [2.0]), ("update", [1.0]), ("other", [0.5]),
    ]  # fmt: skip


def test_a_null_is_a_gap_and_only_nulls_are_no_chart() -> None:
    rows = [{"step": i, "optim/grad_norm": value, "policy/entropy": None} for i, value in enumerate((1.0, None, 2.0))]
    (chart,) = charts(rows, staleness_bound=None)
    assert (chart["title"], chart["traces"][0]["y"]) == ("Gradient norm", [1.0, None, 2.0])


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=20, max_size=90))
def test_the_mean_of_the_last_values_that_exist(values: list[float | None]) -> None:
    shown = charts([{"step": i, "reward/mean": value} for i, value in enumerate(values)], staleness_bound=None)
    if not shown:
        assert set(values) == {None}
        return
    _, mean = shown[0]["traces"]
    window = max(3, len(values) // 20)
    for end, y in enumerate(mean["y"], start=1):
        recent = [value for value in values[max(0, end - window) : end] if value is not None]
        assert y == (pytest.approx(sum(recent) / len(recent), abs=1e-9) if recent else None)


def test_metrics_of_rewards_and_workflow_are_shown() -> None:
    rows = [{"step": step, "rewards/correct": 0.5, "rewards/brief": -1.0, "workflow/turns": 2.0} for step in range(3)]
    traces = {chart["title"]: chart["traces"] for chart in charts(rows, staleness_bound=None)}
    assert {title: [(one["name"], one["y"]) for one in of_title] for title, of_title in traces.items()} == {
        "Rewards by function": [("brief", [-1.0] * 3), ("correct", [0.5] * 3)],
        "turns": [("workflow/turns", [2.0] * 3)],
    }


def test_tiny_numbers_have_an_exponent_and_no_prefix() -> None:
    (chart,) = charts([{"step": 0, "policy/mismatch_kl": 8e-14}], staleness_bound=None)
    assert chart["layout"]["yaxis"]["exponentformat"] == "e", "80f is no number"


def test_servers_are_drawn_once_a_run_has_some() -> None:
    rows = [
        {"step": step, "servers/live": 1.0 + step, "servers/joined": 2.0 * step, "servers/left": 0.0}
        for step in range(2)
    ]
    (chart,) = charts(rows, staleness_bound=None)
    assert chart["title"] == "Servers"
    assert {one["name"]: one["y"] for one in chart["traces"]} == {"live": [1, 2], "joined": [0, 2], "left": [0, 0]}


def test_malformed_calls_are_drawn_by_kind_once_there_are_some() -> None:
    rows = [{"step": step, "agent/malformed_calls": 0.0, "agent/malformed_calls_json": 0.0} for step in range(3)]
    assert "Malformed calls" not in [one["title"] for one in charts(rows, staleness_bound=None)]
    rows[2] |= {"agent/malformed_calls": 0.5, "agent/malformed_calls_json": 0.5, "agent/malformed_calls_text": 0.0}
    (found,) = (one for one in charts(rows, staleness_bound=None) if one["title"] == "Malformed calls")
    assert [(trace["name"], trace["y"]) for trace in found["traces"]] == [("all", [0, 0, 0.5]), ("json", [0, 0, 0.5])]

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.core.records import CallLog, CallRecord, Summary, overlap, read_calls, summary


def record(begin: float, end: float, group: str = "actor", step: int = 0) -> CallRecord:
    return CallRecord(step, "actor_inf", "actor", group, begin, end, moved_mib=1.5, attempt=1, machines=("a", "b"))


def test_calls_that_wait_one_second_each() -> None:
    side_by_side = [record(10, 11, group) for group in ("actor", "ref", "critic")]
    assert overlap(side_by_side) == 3.0
    assert overlap([record(number, number + 1) for number in range(3)]) == 1.0
    assert overlap([record(0, 2), record(1, 3), record(7, 8)]) == 5 / 4, "the pause does not count"
    assert overlap([]) == overlap([record(5, 5)]) == 0.0


def test_a_step_in_numbers() -> None:
    calls = [record(2, 4), record(3, 6, group="ref"), record(8, 10)]
    idle = {"actor": 1 - 4 / 8, "ref": 1 - 3 / 8, "critic": 1.0}
    assert summary(calls, idle) == Summary(2, 10, overlap=7 / 6, moved_mib=4.5, idle=idle)
    at_once = summary([record(5, 5)], ["actor"])
    assert at_once == Summary(5, 5.001, overlap=0.0, moved_mib=1.5, idle={"actor": 1.0}), "a clock may stand still"


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=8)


@given(intervals, intervals)
def test_overlap_and_idle_share_of_whole_seconds(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    records = [record(start, start + duration) for start, duration in spans]
    busy = {second for start, duration in spans for second in range(start, start + duration)}
    assert overlap(records) == sum(duration for _, duration in spans) / len(busy)
    calls = [*records, *(record(start, start + duration, group="ref") for start, duration in others)]
    length = max(one.end for one in calls) - min(one.begin for one in calls)
    assert summary(calls, ["actor"]).idle["actor"] == pytest.approx(1 - len(busy) / length)


def test_a_log_reads_back_and_a_resumed_run_drops_what_it_redoes(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    assert read_calls(path) == []
    log = CallLog(path)
    written = [record(step + 0.25, step + 0.5, step=step) for step in range(4)]
    for one in written:
        log.append(one)
    assert read_calls(path) == written
    with path.open("a") as file:
        file.write('{"step": 4, "call"')  # cut off by a crash
    resumed = CallLog(path, start_step=2)
    resumed.append(record(9, 10, step=2))
    assert read_calls(path) == [*written[:2], record(9, 10, step=2)]
    CallLog(path)
    assert read_calls(path) == []

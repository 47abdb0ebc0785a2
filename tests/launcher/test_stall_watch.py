"""The runs that the launcher calls stalled, and those that it does not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from arealite.watchdog import stall

SFT = ("allocation_mode=d1", "model.path=tiny")


def test_a_run_that_stalls_ends_with_one_verdict(launch_script):
    run = launch_script(
        """
        from arealite.utils import heartbeat
        note("trainer-0")
        heartbeat.tick()
        with heartbeat.waiting("the tide"): time.sleep(600)
        """,
        *SFT,
        "launcher.stall_timeout=2",
    )
    assert run.end() == 4, run.output
    assert run.output.count("stalled: no progress for ") == 1
    pid = next(iter(run.pids))
    assert f"s: trainer-0 (pid {pid}) waits for the tide at " in run.output
    assert len(list(run.logs.parent.glob("stall_*.txt"))) == 1


def stalled_at(
    monkeypatch: pytest.MonkeyPatch,
    beats: Callable[[float], dict[str, int]],
    output: Callable[[float], int] = lambda now: 0,
) -> float:
    """Return when a watch of two ranks calls their run stalled, on a clock of its own; inf: not in 100 s.

    `beats` tells the counts of those that have begun, `output` how much all have written. The timeouts are 5 and 20 s.
    """
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 100:
            raise TimeoutError

    def read_heartbeats(_: Path) -> list[stall.Process]:
        return [stall.Process(name, 1, count) for name, count in beats(now).items()]

    monkeypatch.setattr(stall, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(stall, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    monkeypatch.setattr(stall, "read_heartbeats", read_heartbeats)
    monkeypatch.setattr(stall, "collect", lambda *_, **__: None)
    monkeypatch.setattr(stall.StallWatch, "_save", lambda *_: [])
    watch = stall.StallWatch(
        timeout_s=5.0,
        setup_timeout_s=20.0,
        logs=Path(),
        expected=["trainer-0", "trainer-1"],
        count_output=lambda: output(now),
    )
    try:
        asyncio.run(watch.stall())
    except TimeoutError:
        return math.inf
    return now


def test_progress_of_one_rank_is_no_stall(monkeypatch):
    assert stalled_at(monkeypatch, lambda now: {"trainer-0": 1, "trainer-1": int(now / 4)}) == math.inf
    assert 20 < stalled_at(monkeypatch, lambda now: {"trainer-0": 1, "trainer-1": int(min(now, 16) / 4)}) < 23


def test_the_start_has_a_timeout_of_its_own_and_lines_are_progress(monkeypatch):
    first = {"trainer-0": 1}
    assert 20 < stalled_at(monkeypatch, lambda now: first) < 22
    assert 35 < stalled_at(monkeypatch, lambda now: first, output=lambda now: int(min(now, 16))) < 38
    assert 5 < stalled_at(monkeypatch, lambda now: {"trainer-0": 1, "trainer-1": 1}, output=int) < 7

"""The runs that the launcher calls stalled, and those that it does not."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

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


def test_progress_is_no_stall(launch_script):
    """Twice the timeout, with a tick now and then by one of two ranks only."""
    run = launch_script(
        """
        from arealite.utils import heartbeat
        heartbeat.tick()
        for _ in range(20):
            time.sleep(0.5)
            if os.environ["RANK"] == "1": heartbeat.tick()
        """,
        *("allocation_mode=d2", "model.path=tiny", "launcher.stall_timeout=5"),
    )
    assert run.end() == 0, run.output
    assert "stalled" not in run.output


def test_the_start_has_a_timeout_of_its_own_and_lines_are_progress(launch_script):
    run = launch_script(
        """
        for index in range(9):
            time.sleep(1)
            print("loading part", index, flush=True)
        note("trainer-0"); time.sleep(600)
        """,
        *("allocation_mode=d1", "actor.path=tiny", "rollout.server_addrs=[127.0.0.1:9]"),
        *("launcher.stall_timeout=1", "rollout.setup_timeout=7"),
    )
    assert run.end() == 4, run.output
    before, verdict, _ = run.output.partition("stalled: no progress for ")
    assert "loading part 8" in before and verdict
    match = re.search(r"no progress for (\d+) s: trainer-0 has not made its first progress", run.output)
    assert match is not None and int(match[1]) >= 7


def test_servers_without_trainer_may_idle(launch_script):
    run = launch_script(
        "raise SystemExit(1)", "allocation_mode=sglang.d1", "actor.path=tiny", "launcher.stall_timeout=0.5"
    )
    while "is ready at" not in run.output:
        assert run.process.poll() is None, run.output
        time.sleep(0.02)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(2.5)
    assert "stalled" not in run.output
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130

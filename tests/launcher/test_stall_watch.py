"""When the launcher calls a run stalled and when not, and that it may go on."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

SFT = ("allocation_mode=d1", "model.path=tiny")


def test_a_run_that_goes_on_after_a_verdict(launch_script):
    run = launch_script(
        """
        from arealite.utils import heartbeat
        note("trainer-0")
        heartbeat.tick()
        run = pathlib.Path(os.environ[heartbeat.FOLDER_VARIABLE]).parents[1]
        for count in (1, 2):
            with heartbeat.waiting("the tide"):
                while len(list(run.glob("stall_*.txt"))) < count: time.sleep(0.05)
            heartbeat.tick()
        """,
        *SFT,
        "launcher.stall_timeout=2",
        "launcher.on_stall=continue",
    )
    assert run.end() == 0, run.output
    assert run.output.count("stalled: nothing has moved for ") == 2, "one verdict per stall"
    pid = next(iter(run.pids))
    assert f"because of trainer-0 (pid {pid}), which waits for the tide at " in run.output
    assert run.output.count("the run moves again") >= 1
    assert len(list(run.logs.parent.glob("stall_*.txt"))) == 2
    assert "the run is stalled" not in run.output


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
    before, verdict, _ = run.output.partition("stalled: nothing has moved for ")
    assert "loading part 8" in before and verdict
    (pid,) = run.pids
    found = re.search(
        r"nothing has moved for (\d+) s, because of trainer-0 \(pid (\d+)\), which has not come", run.output
    )
    assert found is not None and int(found[1]) >= 7 and int(found[2]) == pid


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

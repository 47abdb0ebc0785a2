"""The culprit of a stall, on evidence made by hand: each rule, and which of two wins."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from arealite.watchdog.stall import Evidence, Process, Verdict, Wait, judge, stacks_of

MAIN = 0x7F01


def stack(*frames: str) -> str:
    """Return what faulthandler writes of the main thread (innermost first) below another thread's stack."""
    lines = [f'  File "{frame.rpartition(":")[0]}", line {frame.rpartition(":")[2]} in f' for frame in frames]
    other = ["Thread 0x0000000000007f02 (most recent call first):", '  File "/other.py", line 1 in g', ""]
    return "\n".join([*other, f"Current thread {MAIN:#018x} (most recent call first):", *lines])


def process(name: str, *waits: Wait, state: str = "sleeping", **changes: Any) -> Process:
    """Return a process whose counter has not moved for 10 s."""
    pid = 100 + sum(map(ord, name))
    return dataclasses.replace(
        Process(name, pid, count=5, moved_s=10, silent_s=0.2, waits=waits, state=state), **changes
    )


def wait(what: str, on: str | None, for_s: float = 10, *, is_main: bool = True, pid: int | None = None) -> Wait:
    return Wait(what, on, for_s, is_main, pid)


def judged(*processes: Process, expected: tuple[str, ...] = ()) -> Verdict:
    return judge(Evidence(10.0, processes, expected))


FOR_EPISODES = wait("a batch", "rollout")
IN_SUM = wait("a sum over all ranks", "ranks", 9)


def episodes(on: str, for_s: float = 50, line: str = "/user.py:7 in arun_episode") -> dict[str, Any]:
    return {"oldest": [{"name": "0-3", "for_s": for_s, "on": on, "line": line}]}


def test_a_stopped_process_comes_before_all_it_holds_up():
    server = process("server-0", state="stopped", silent_s=12)
    trainer = process("trainer-0", FOR_EPISODES, reports={"episodes": episodes("workflow")})
    verdict = judged(trainer, server)
    assert verdict.culprit == f"server-0 (pid {server.pid})" and verdict.for_s == 12
    assert "state T" in verdict.reason and f"kill -CONT {server.pid}" in verdict.advice
    _, _, *waiting = verdict.lines(Evidence(10.0, [trainer, server]))
    assert [text.split(" (")[0].strip() for text in waiting] == ["trainer-0"]


def test_a_stopped_process_without_a_heartbeat():
    worker = process("reward-worker", state="stopped", count=None, silent_s=0)
    assert judged(process("trainer-0", FOR_EPISODES), worker).culprit == f"reward-worker (pid {worker.pid})"


def test_c_code_that_holds_the_gil():
    stuck = process("trainer-0", FOR_EPISODES, silent_s=9, stacks=stack(f"{re.__file__}:1", "/home/me/w.py:4"))
    verdict = judged(stuck)
    assert "GIL" in verdict.reason and "/home/me/w.py:4 in f" in verdict.reason and verdict.for_s == 9


def test_a_rank_outside_the_collective():
    ranks = [process(f"trainer-{rank}", IN_SUM) for rank in range(4)]
    ranks[2] = process("trainer-2", stacks=stack(f"{re.__file__}:1", "/home/me/train.py:33"))
    verdict = judged(*ranks)
    assert verdict.culprit.startswith("trainer-2 ") and verdict.for_s == 10
    assert verdict.reason == "runs at /home/me/train.py:33 in f"


def test_a_rank_in_a_collective_of_the_users_own_is_in_one():
    """Rank 0 publishes no wait, but its stack is inside torch.distributed."""
    barrier = stack("/site-packages/torch/distributed/distributed_c10d.py:9", "/home/me/train.py:20")
    assert judged(process("trainer-0", stacks=barrier), process("trainer-1")).culprit.startswith("trainer-1 ")


def test_a_rank_that_waits_for_a_disk_keeps_all_others_in_the_collective():
    ranks = process("trainer-0", IN_SUM), process("trainer-1", wait("step_3 to be written to /runs", "disk", 4))
    verdict = judged(*ranks)
    assert "step_3 to be written" in verdict.reason and verdict.for_s == 4


def test_all_ranks_in_one_collective_blames_the_one_that_entered_first():
    ranks = [process(f"trainer-{rank}", wait("a sum", "ranks", for_s)) for rank, for_s in enumerate((5, 9, 7))]
    assert judged(*ranks).culprit.startswith("trainer-1 ")


def test_rank_0_that_waits_for_episodes_is_not_to_blame():
    one = process("trainer-0", FOR_EPISODES, reports={"episodes": episodes("workflow")})
    verdict = judged(one, process("trainer-1", IN_SUM))
    assert verdict.culprit == f"episode 0-3 in trainer-0 (pid {one.pid})"
    assert "awaits at /user.py:7 in arun_episode" in verdict.reason and verdict.for_s == 50


def test_a_process_that_has_not_begun():
    assert judged(process("trainer-0", IN_SUM), expected=("server-0", "trainer-0")).culprit == "server-0"


def test_a_blocked_loop_comes_before_rewards_and_episodes():
    reports = {
        "loop a": {"overdue_s": 9, "blocked_by": "/user.py:5 in g"},
        "loop b": {"error": "KeyError()"},
        "episodes": episodes("workflow"),
    }
    reward = wait("reward function r", "reward", is_main=False, pid=7)
    verdict = judged(process("trainer-0", FOR_EPISODES, reward, reports=reports))
    assert verdict.reason.endswith("/user.py:5 in g") and verdict.for_s == 9


def test_the_oldest_reward_call_comes_before_episodes():
    calls = [wait("reward function r", "reward", for_s, is_main=False, pid=7 + for_s) for for_s in (11, 30, 20)]
    text = 'Current thread 0x0000000000000001 (most recent call first):\n  File "/me/reward.py", line 9 in r'
    worker = process("reward-worker", pid=37, count=None, silent_s=0, stacks=text)
    reports = {"loop a": {"blocked_by": None}, "episodes": episodes("workflow")}
    verdict = judged(process("trainer-0", FOR_EPISODES, *calls, reports=reports), worker)
    assert verdict.culprit == "reward function r (pid 37)" and verdict.for_s == 30
    assert "at /me/reward.py:9 in r" in verdict.reason
    stackless = dataclasses.replace(worker, stacks="")
    assert "None" not in judged(process("trainer-0", FOR_EPISODES, *calls), stackless).reason


def test_episodes_of_another_process_than_the_one_that_waits_for_them():
    """Core's rollout workers."""
    worker = process("rollout-1", reports={"episodes": episodes("reward")})
    assert judged(process("trainer-0", FOR_EPISODES), worker).culprit.startswith("episode 0-3 in rollout-1 ")


def test_episodes_are_no_culprits_while_nobody_waits_for_them():
    reports = {"episodes": episodes("workflow"), "loop a": {"blocked_by": None}}
    one = process("trainer-0", stacks=stack("/home/me/train.py:8"), reports=reports)
    verdict = judged(one)
    assert verdict.culprit == f"trainer-0 (pid {one.pid})" and "runs at /home/me/train.py:8 in f" in verdict.reason


def test_servers_are_named_if_all_episodes_wait_for_them():
    reports = {"episodes": episodes("servers"), "servers": {"h1:1": 0, "h2:1": 900}}
    verdict = judged(process("trainer-0", FOR_EPISODES, reports=reports), process("server-0"))
    assert "h2:1" in verdict.reason and "h1:1" not in verdict.reason and verdict.for_s == 50


def test_an_idle_server_is_never_blamed():
    assert judged(process("trainer-0"), process("server-0")).culprit.startswith("trainer-0 ")
    assert judged(process("trainer-0", IN_SUM), process("server-0")).culprit.startswith("trainer-0 ")


def test_stacks_of_faulthandler():
    other, main = stacks_of(stack("/a.py:1", "/b.py:22"))
    assert [(line.file, line.line, line.function) for line in main] == [("/a.py", 1, "f"), ("/b.py", 22, "f")]
    assert stacks_of("nonsense\n  File x") == []
    assert Path(other[0].file).name == "other.py"

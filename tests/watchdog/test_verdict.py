"""Who is blamed for a stall, on evidence made by hand: each rule, and which of two wins."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from arealite.watchdog.evidence import Evidence, Process, Progress, ServerState, Wait, stacks_of
from arealite.watchdog.verdict import Verdict, judge

NOW = 1000.0
MAIN = 0x7F01


def stack(*frames: str) -> str:
    """Return what faulthandler writes of the main thread (innermost first) below another thread's stack."""
    lines = [f'  File "{frame.rpartition(":")[0]}", line {frame.rpartition(":")[2]} in f' for frame in frames]
    other = ["Thread 0x0000000000007f02 (most recent call first):", '  File "/other.py", line 1 in g', ""]
    return "\n".join([*other, f"Current thread {MAIN:#018x} (most recent call first):", *lines])


def process(
    name: str, *waits: Wait, state: str = "S", stacks: str = "", told_s_ago: float = 0.2, **changes: Any
) -> Process:
    """Return a process whose counter has not moved for 10 s."""
    pid = 100 + sum(map(ord, name))
    progress = Progress(name, pid, 5, NOW - 10, NOW - told_s_ago, MAIN, waits, changes.pop("reports", {}))
    return dataclasses.replace(Process(name, pid, state, 0.0, "python", progress, stacks), **changes)


def wait(what: str, on: str | None, since_s: float = 10, *, is_main: bool = True, pid: int | None = None) -> Wait:
    return Wait(what, on, NOW - since_s, is_main, pid)


def judged(*processes: Process, servers: tuple[ServerState, ...] = (), expected: tuple[str, ...] = ()) -> Verdict:
    return judge(Evidence(NOW, 10.0, processes, servers, "1 GiB of 2 GiB free in /runs", expected))


FOR_EPISODES = wait("a batch", "rollout")
IN_SUM = wait("a sum over all ranks", "ranks", 9)
IDLE = ServerState("server-0", "127.0.0.1:1", {"running": 0, "waiting": 0, "is_paused": False})


def episode(on: str, since_s: float = 50, line: str = "/user.py:7 in arun_episode") -> dict[str, Any]:
    return {"name": "0-3", "since": NOW - since_s, "on": on, "line": line}


def test_a_stopped_process_comes_before_all_it_holds_up():
    server = process("server-0", state="stopped", told_s_ago=12)
    verdict = judged(process("trainer-0", FOR_EPISODES, reports={"episodes": [episode("code")]}), server)
    assert verdict.culprit == f"server-0 (pid {server.pid})" and verdict.since == NOW - 12
    assert "stopped by a signal" in verdict.reason and f"kill -CONT {server.pid}" in verdict.advice
    assert [text.split(" (")[0] for text in verdict.waiting] == ["trainer-0"]


def test_a_stopped_process_that_publishes_nothing():
    worker = process("reward-worker", state="stopped", progress=None)
    assert judged(process("trainer-0", FOR_EPISODES), worker).culprit == f"reward-worker (pid {worker.pid})"


def test_a_rank_outside_the_collective():
    ranks = [process(f"trainer-{rank}", IN_SUM) for rank in range(4)]
    ranks[2] = process("trainer-2", stacks=stack(f"{re.__file__}:1", "/home/me/train.py:33"))
    verdict = judged(*ranks)
    assert verdict.culprit.startswith("trainer-2 ") and verdict.since == NOW - 10
    assert "a sum over all ranks" in verdict.reason and verdict.reason.endswith("runs at /home/me/train.py:33 in f")
    assert len(verdict.waiting) == 3


def test_a_rank_in_a_collective_of_the_users_own_is_in_one():
    """Rank 0 says nothing, but its stack is inside torch.distributed."""
    barrier = stack("/site-packages/torch/distributed/distributed_c10d.py:9", "/home/me/train.py:20")
    assert judged(process("trainer-0", stacks=barrier), process("trainer-1")).culprit.startswith("trainer-1 ")


def test_rank_0_that_waits_for_episodes_is_not_to_blame():
    one = process("trainer-0", FOR_EPISODES, reports={"episodes": [episode("code")]})
    verdict = judged(one, process("trainer-1", IN_SUM))
    assert verdict.culprit == f"episode 0-3 in trainer-0 (pid {one.pid})"
    assert "awaits at /user.py:7 in arun_episode" in verdict.reason and verdict.since == NOW - 50
    assert len(verdict.waiting) == 2


def test_two_ranks_outside_are_not_one_culprit():
    verdict = judged(process("trainer-0", IN_SUM), process("trainer-1"), process("trainer-2", wait("a file", None, 60)))
    assert verdict.culprit.startswith("trainer-2 ") and "waits for a file" in verdict.reason


def test_a_process_that_has_not_begun():
    late = process("trainer-1", progress=None)
    verdict = judged(process("trainer-0", IN_SUM), late, expected=("trainer-0", "trainer-1"))
    assert verdict.culprit == f"trainer-1 (pid {late.pid})" and "has not come to its first progress" in verdict.reason
    assert judged(process("trainer-0", IN_SUM), expected=("server-0", "trainer-0")).culprit == "server-0"


def test_c_code_that_keeps_the_lock():
    stuck = process("trainer-0", FOR_EPISODES, told_s_ago=9, stacks=stack(f"{re.__file__}:1", "/home/me/w.py:4"))
    verdict = judged(stuck)
    assert "keeps Python's lock" in verdict.reason and "/home/me/w.py:4 in f" in verdict.reason
    assert verdict.since == NOW - 9


def test_a_blocked_loop_comes_before_rewards_and_episodes():
    reports = {
        "loop a": {"overdue_s": 9, "blocked_by": {"line": "/user.py:5 in g", "since": NOW - 9}},
        "episodes": [episode("code")],
    }
    reward = wait("reward function r", "reward", is_main=False, pid=7)
    verdict = judged(process("trainer-0", FOR_EPISODES, reward, reports=reports))
    assert "blocks the rollout loop at /user.py:5 in g" in verdict.reason and verdict.since == NOW - 9


def test_the_oldest_reward_call_comes_before_episodes():
    calls = [wait("reward function r", "reward", since_s, is_main=False, pid=7 + since_s) for since_s in (11, 30, 20)]
    worker = process(
        "reward-worker",
        pid=37,
        progress=None,
        stacks="\n".join(
            ["Current thread 0x0000000000000001 (most recent call first):", '  File "/me/reward.py", line 9 in r']
        ),
    )
    reports = {"loop a": {"blocked_by": None}, "episodes": [episode("reward"), episode("code")]}
    verdict = judged(process("trainer-0", FOR_EPISODES, *calls, reports=reports), worker)
    assert verdict.culprit == "reward function r (pid 37)" and verdict.since == NOW - 30
    assert "at /me/reward.py:9 in r" in verdict.reason


def test_episodes_are_no_culprits_while_nobody_waits_for_them():
    reports = {"episodes": [episode("code")], "loop a": {"blocked_by": None}}
    one = process("trainer-0", stacks=stack("/home/me/train.py:8"), reports=reports)
    verdict = judged(one)
    assert verdict.culprit == f"trainer-0 (pid {one.pid})" and "runs at /home/me/train.py:8 in f" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "does not answer GET /server_info (TimeoutError)"),
        ({"running": 3, "waiting": 0, "is_paused": False}, "generates nothing for 3 running requests"),
        ({"running": 0, "waiting": 2, "is_paused": True}, "is paused with 2 requests waiting"),
    ],
)
def test_servers(answer: dict[str, Any] | None, words: str):
    sick = ServerState("server-1", "127.0.0.1:2", answer, "TimeoutError")
    waiting = process("trainer-0", FOR_EPISODES, reports={"episodes": [episode("servers")]})
    verdict = judged(waiting, process("server-0"), process("server-1"), servers=(IDLE, sick))
    assert words in verdict.reason and verdict.culprit.startswith("server-1 (pid ")
    assert [text.split(" (")[0] for text in verdict.waiting] == ["trainer-0", "server-0"]


def test_a_server_of_someone_else():
    sick = ServerState("10.0.0.1:80", "10.0.0.1:80", None, "ConnectionRefusedError")
    assert judged(process("trainer-0", FOR_EPISODES), servers=(sick,)).culprit == "10.0.0.1:80 at 10.0.0.1:80"


def test_disks():
    slow = process("trainer-0", wait("step_3 to be written to /runs", "disk", 40))
    assert "step_3 to be written" in judged(slow).reason and judged(slow).since == NOW - 40
    stuck = process("trainer-0", state="disk-sleep")
    assert "state disk-sleep; 1 GiB of 2 GiB free in /runs" in judged(stuck).reason


def test_an_idle_server_is_never_blamed():
    assert judged(process("trainer-0"), process("server-0"), servers=(IDLE,)).culprit.startswith("trainer-0 ")


def test_all_ranks_in_one_collective_blames_the_one_that_entered_first():
    ranks = [process(f"trainer-{rank}", wait("a sum", "ranks", since)) for rank, since in enumerate((5, 9, 7))]
    assert judged(*ranks).culprit.startswith("trainer-1 ")


def test_nothing_published_at_all():
    assert judged().culprit == "the run"


def test_lines_for_the_reader():
    verdict = Verdict("x", "sleeps", NOW - 12, "Wake it.", ("y waits",))
    evidence = Evidence(NOW, 10.0, (), (), "")
    assert verdict.lines(evidence) == [
        "stalled: nothing has moved for 10 s, because of x, which sleeps, for 12 s.",
        "    Wake it.",
        "    y waits",
    ]


def test_stacks_of_faulthandler():
    stacks = stacks_of(stack("/a.py:1", "/b.py:22"))
    assert list(stacks) == [0x7F02, MAIN]
    assert [(line.file, line.line, line.function) for line in stacks[MAIN]] == [("/a.py", 1, "f"), ("/b.py", 22, "f")]
    assert stacks_of("nonsense\n  File x") == {}
    assert Path(stacks[0x7F02][0].file).name == "other.py"

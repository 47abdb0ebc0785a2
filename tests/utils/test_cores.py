"""Threads of OpenMP on cores of their own, in processes of their own, as OpenMP reads its variables once."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, subprocess, sys
import torch
from arealite.utils.cores import own_cores, taken
def cores_of(task):
    return sorted(os.sched_getaffinity(int(task)))
own_cores()
outside = cores_of(0)
with taken():
    tasks = {task: cores_of(task) for task in os.listdir("/proc/self/task")}
    torch.ones(2**20).sum()
after = cores_of(0)
child = json.loads(subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]))
print(json.dumps([outside, after, child, sorted(cores for cores in tasks.values() if len(cores) == 1)]))
"""
CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def run(*arguments: int, threads: int, **env: str) -> list[list[int]]:
    """Return the cores of the process outside and after, those of a child, and those to which threads are bound."""
    place = dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), map(str, arguments), strict=True))
    env = os.environ | {"OMP_NUM_THREADS": str(threads)} | place | env
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    result: list[list[int]] = json.loads(done.stdout)
    return result


def test_each_thread_has_a_core_while_it_computes() -> None:
    outside, after, child, bound = run(0, 1, threads=len(CORES))
    assert outside == after == child == CORES
    assert bound == [[core] for core in CORES]


@pytest.mark.parametrize(
    ("arguments", "threads", "env"),
    [
        ((0, 1), 1, {}),
        ((1, 1), len(CORES), {}),
        ((0, 1), len(CORES), {"OMP_PROC_BIND": "false"}),
    ],
)
def test_threads_are_left_alone(arguments: tuple[int, int], threads: int, env: dict[str, str]) -> None:
    """One thread meets none, other processes have taken the cores, the user has chosen."""
    outside, after, _, bound = run(*arguments, threads=threads, **env)
    assert outside == after == CORES and bound == []


OTHERS = """
import os, threading, torch
from arealite.utils.cores import own_cores
own_cores()
def compute():
    before = len(os.listdir("/proc/self/task"))
    torch.ones(2**20).sum()
    print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
other = threading.Thread(target=compute)
other.start()
other.join()
print(torch.get_num_threads())
"""


def test_other_threads_of_the_process_compute_alone() -> None:
    """Else OpenMP would have more threads than cores, and put those to sleep that wait for each other."""
    env = os.environ | {"OMP_NUM_THREADS": str(len(CORES))}
    done = subprocess.run([sys.executable, "-c", OTHERS], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0", str(len(CORES))]


def test_a_new_thread_computes_with_the_threads_that_it_asked_for() -> None:
    """As that of the server, whose attention took one while its products took all."""
    code = "import threading, torch; from arealite.utils.cores import compute_with\n"
    code += "def run():\n    compute_with(2)\n    print(torch.get_num_threads())\n"
    code += "other = threading.Thread(target=run); other.start(); other.join()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]

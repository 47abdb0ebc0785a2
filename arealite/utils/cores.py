"""Keeps the threads of OpenMP on cores of their own while they compute, where a run takes most cores of its node.

They meet at the end of each operation, hundreds of times per step. If other programs want the cores, too, the scheduler
may put two threads on one: each meeting then takes a time slice. Children and other threads are not bound.

Other threads of the process compute alone: with helpers of theirs there are more threads than cores, and OpenMP then
puts those of the trainer to sleep at each meeting, which makes a step several times as long.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator

import torch

_TASKS = "/proc/self/task"


def compute_with(num_threads: int) -> None:
    """Let the calling thread compute with so many threads, and alone each one that has not computed yet."""
    torch.set_num_threads(num_threads)
    torch.get_num_threads()  # a thread's first call takes the number of the last call of any thread
    other = threading.Thread(target=torch.set_num_threads, args=(1,))  # the last call, of any thread, is for those
    other.start()
    other.join()


@functools.cache
def own_cores() -> list[int]:
    """Bind the threads of this rank and return its cores, the first for the calling thread; empty if none are bound.

    Call it before anything else has computed in parallel, as it finds the threads by starting them.
    """
    compute_with(num := torch.get_num_threads())
    index, num_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    own, takes_most = cores[index * num : (index + 1) * num], 2 * num * num_ranks > len(cores)
    is_possible = os.path.isdir(_TASKS) and "OMP_PROC_BIND" not in os.environ and not torch.cuda.is_available()
    if num == 1 or len(own) < num or not takes_most or not is_possible:
        return []
    before = {*os.listdir(_TASKS)}
    torch.ones(2**20).sum()
    if len(threads := {*os.listdir(_TASKS)} - before) != num - 1:
        return []
    for thread, core in zip(threads, own[1:], strict=True):
        os.sched_setaffinity(int(thread), {core})
    return own


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Keep the calling thread on its core, too."""
    if not (own := own_cores()):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

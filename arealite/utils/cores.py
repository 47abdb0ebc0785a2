"""Keeps the threads of OpenMP on cores of their own while they compute, where a run takes most cores of its node.

They meet at the end of each operation, hundreds of times per step. If other programs want the cores, too, the scheduler
may put two threads on one: each meeting then takes a time slice. Children and other threads are not bound.
"""

import contextlib
import functools
import os
from collections.abc import Iterator

_TASKS = "/proc/self/task"


class OwnCores:
    """The cores of this process, the `index`-th of `num_processes` on its node that have as many threads each.

    Make it before anything else has computed in parallel, as it finds the threads by starting them.
    """

    def __init__(self, index: int, num_processes: int) -> None:
        import torch  # launchers import this module

        self._own: list[int] = []
        num, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0), reverse=True)
        own, takes_most = cores[index * num : (index + 1) * num], 2 * num * num_processes > len(cores)
        is_possible = os.path.isdir(_TASKS) and "OMP_PROC_BIND" not in os.environ and not torch.cuda.is_available()
        if num == 1 or len(own) < num or not takes_most or not is_possible:
            return
        before = {*os.listdir(_TASKS)}
        torch.ones(2**20).sum()
        if len(threads := {*os.listdir(_TASKS)} - before) == num - 1:
            self._own = own
            for thread, core in zip(threads, own[1:], strict=True):
                os.sched_setaffinity(int(thread), {core})

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep the calling thread on its core, too."""
        if not self._own:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._own[:1])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@functools.cache
def of_this_rank() -> OwnCores:
    """Return the cores of a rank of the trainer, by torchrun's variables."""
    return OwnCores(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

"""Two ranks in one process, whose `reduce` sums over both."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def on_two_ranks(function: Callable[[int, Reduce], torch.Tensor]) -> list[torch.Tensor]:
    """Return what `function(rank, reduce)` returns on each rank."""
    meeting = threading.Barrier(2, timeout=120)
    shares: dict[int, torch.Tensor] = {}

    def run(rank: int) -> torch.Tensor:
        def sum_over_ranks(local: torch.Tensor) -> torch.Tensor:
            shares[rank] = local
            meeting.wait()
            total = shares[0] + shares[1]
            meeting.wait()
            return total

        return function(rank, sum_over_ranks)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))

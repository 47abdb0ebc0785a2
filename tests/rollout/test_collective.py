"""Rank 0 collects, every rank gets its part or rank 0's error: real gloo processes."""

from __future__ import annotations

import multiprocessing
import socket
from typing import Any

import pytest
import torch.distributed as dist

from arealite.api.errors import EpisodeError
from arealite.rollout.collective import RankZeroExchange

WORLD_SIZE = 2


def run_rank(rank: int, port: int, results: Any) -> None:
    """Scatter twice, then fail on rank 0, then scatter again."""
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    exchange = RankZeroExchange()
    outcomes: list[object] = []
    for step in range(3):

        def produce(world_size: int, step: int = step) -> list[str]:
            assert dist.get_rank() == 0
            if step == 1:
                raise ZeroDivisionError("no rollouts today")
            return [f"step {step} part {part} of {world_size}" for part in range(world_size)]

        try:
            outcomes.append(exchange.scatter(produce))
        except (ZeroDivisionError, EpisodeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    results.put((rank, outcomes))
    dist.destroy_process_group()


def test_every_rank_gets_its_part_or_the_error_of_rank_0() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    processes = [context.Process(target=run_rank, args=(rank, port, results)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    outcomes = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    for rank in range(WORLD_SIZE):
        assert outcomes[rank][0] == f"step 0 part {rank} of 2"
        assert outcomes[rank][2] == f"step 2 part {rank} of 2"
    assert outcomes[0][1] == "ZeroDivisionError: no rollouts today"
    assert "rank 0" in outcomes[1][1] and "ZeroDivisionError: no rollouts today" in outcomes[1][1]


def test_alone_it_is_a_plain_call() -> None:
    assert RankZeroExchange().scatter(lambda world_size: [world_size]) == 1
    with pytest.raises(ZeroDivisionError):
        RankZeroExchange().scatter(lambda world_size: [1 // 0])

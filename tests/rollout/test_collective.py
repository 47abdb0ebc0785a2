"""Rank 0 collects, every rank gets its part or rank 0's error, also in the middle of it: real gloo processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arealite.api.errors import EpisodeError
from arealite.rollout.collective import RankZeroExchange
from arealite.utils.distributed import agreed

WORLD_SIZE = 2


def run_rank(rank: int, port: int, results: Any) -> None:
    """Scatter, fail on rank 0, scatter again, then with interludes: the second fails everywhere, the last on rank 1."""
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
    played: list[float] = []

    def fail() -> None:
        raise ArithmeticError("this one fails")

    def interlude() -> None:
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        played.append(total.item())
        if len(played) == 2:
            agreed(fail)
        if len(played) == 4 and rank == 1:
            fail()
        if len(played) == 4:
            dist.all_reduce(total)

    def produce_with(num_interludes: int) -> list[str]:
        for _ in range(num_interludes):
            assert exchange.play(interlude)
        return [f"part {part}" for part in range(WORLD_SIZE)]

    assert rank != 0 or not exchange.play(interlude), "nobody listens"
    for num_interludes in (1, 1, 1):
        try:
            outcomes.append(exchange.scatter(lambda _, count=num_interludes: produce_with(count), interlude))
        except (ArithmeticError, EpisodeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    outcomes.append(played)
    results.put((rank, outcomes))
    results.close()
    results.join_thread()
    with pytest.raises(ArithmeticError if rank else RuntimeError):  # who fails alone leaves, and the others notice
        exchange.scatter(lambda _: produce_with(1), interlude)
    os._exit(0)


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
        assert outcomes[rank][3] == outcomes[rank][5] == f"part {rank}"
        assert "ArithmeticError: this one fails" in outcomes[rank][4]
        assert outcomes[rank][6] == [3.0, 3.0, 3.0]
    assert outcomes[0][1] == "ZeroDivisionError: no rollouts today"
    assert "rank 0" in outcomes[1][1] and "ZeroDivisionError: no rollouts today" in outcomes[1][1]


def test_alone_it_is_a_plain_call() -> None:
    played: list[int] = []
    assert RankZeroExchange().play(lambda: played.append(1)) and played == [1]
    assert RankZeroExchange().scatter(lambda world_size: [world_size]) == 1
    with pytest.raises(ZeroDivisionError):
        RankZeroExchange().scatter(lambda world_size: [1 // 0])

"""Rank 0 collects, every rank gets its part or rank 0's error, also in the middle of it: real gloo processes."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import testing_forks
import torch
import torch.distributed as dist

from arealite.api.errors import EpisodeError
from arealite.rollout.collective import RankZeroExchange
from arealite.utils import stop
from arealite.utils.distributed import agreed

WORLD_SIZE = 2


def run_rank(test: Connection) -> None:
    """Collect, fail on rank 0, collect again, then with callbacks: the second fails everywhere, the last on rank 1."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    exchange = RankZeroExchange()
    outcomes: list[object] = []
    called: list[float] = []

    def fail() -> None:
        raise ArithmeticError("this one fails")

    def callback() -> None:
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        called.append(total.item())
        if len(called) == 2:
            agreed(fail)
        if len(called) == 4 and rank == 1:
            fail()
        if len(called) == 4:
            dist.all_reduce(total)

    def share(name: str, *, calls_back: bool = False, fails: bool = False) -> str:
        def collect() -> str:
            if calls_back:
                exchange.run_on_every_rank(callback)
            if name == "step 6":
                raise stop.RunStopped(130)
            if fails:
                raise ZeroDivisionError("no rollouts today")
            return name

        def split(name: str, num_ranks: int) -> list[str]:
            if name == "step 2":
                raise KeyError("group_index")
            return [f"{name} part {part} of {num_ranks}" for part in range(num_ranks)]

        return exchange.share(collect, split, callback)

    if rank == 0:
        exchange.run_on_every_rank(callback)
        assert called == [], "nobody listens"
    for step in range(7):
        try:
            outcomes.append(share(f"step {step}", calls_back=2 < step < 6, fails=step == 1))
        except (ArithmeticError, KeyError, EpisodeError, stop.RunStopped) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    outcomes.append(called)
    test.send(outcomes)
    with pytest.raises(ArithmeticError if rank else RuntimeError):  # who fails alone leaves, and the others notice
        share("step 7", calls_back=True)


def test_every_rank_gets_its_part_or_the_error_of_rank_0() -> None:
    with testing_forks.two_ranks(run_rank) as ranks:
        outcomes = [rank.receive() for rank in ranks]
        assert [rank.end() for rank in ranks] == [0, 0]
    for rank in range(WORLD_SIZE):
        assert outcomes[rank][0] == f"step 0 part {rank} of 2"
        assert "KeyError: 'group_index'" in outcomes[rank][2], "what can't be split fails on every rank"
        assert outcomes[rank][3] == f"step 3 part {rank} of 2" and outcomes[rank][5] == f"step 5 part {rank} of 2"
        assert "ArithmeticError: this one fails" in outcomes[rank][4]
        assert outcomes[rank][6].startswith("RunStopped: 1"), "every rank stops, whichever got the signal"
        assert outcomes[rank][7] == [3.0, 3.0, 3.0]
    assert outcomes[0][1] == "ZeroDivisionError: no rollouts today"
    assert "rank 0" in outcomes[1][1] and "ZeroDivisionError: no rollouts today" in outcomes[1][1]


def run_block(test: Connection) -> None:
    """Collect as the two ranks of one block, and give back what each computed."""
    dist.init_process_group("gloo")
    exchange = RankZeroExchange("t2")
    part = exchange.share(lambda: "batch", lambda name, num: [f"{name} {one} of {num}" for one in range(num)], None)
    test.send([part, exchange.gather(f"by rank {dist.get_rank()}")])


def test_the_ranks_of_a_block_get_the_same_part_and_the_last_one_answers() -> None:
    with testing_forks.two_ranks(run_block) as ranks:
        outcomes = [rank.receive() for rank in ranks]
        assert [rank.end() for rank in ranks] == [0, 0]
    assert outcomes == [["batch 0 of 1", ["by rank 1"]], ["batch 0 of 1", []]]


def test_alone_it_is_a_plain_call() -> None:
    exchange, called = RankZeroExchange(), []
    exchange.run_on_every_rank(lambda: called.append(1))
    assert called == [1] and exchange.share(lambda: 7, lambda one, num_ranks: [one] * num_ranks, None) == 7
    with pytest.raises(ZeroDivisionError):
        exchange.share(lambda: 1 // 0, lambda one, num_ranks: [one], None)

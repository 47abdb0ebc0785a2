"""A rank continues from a snapshot as if nothing had happened, bit for bit, also from before the first update."""

from __future__ import annotations

import pickle
import random
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import testing_forks
import torch
import torch.distributed as dist
from training_cases import OPTIMIZER, of_update, token_batch, train_config

from arealite.api.cli_args import LoRAConfig, OptimizerConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.optimizer import MOMENTS
from arealite.engine.sft.lm_engine import FSDPLMEngine

pytestmark = pytest.mark.xdist_group("two_ranks")

UPDATES = 2
SHARES = [[0, 3], [1, 2, 4]]
CONFIGS: dict[str, dict[str, Any]] = {"whole": {}, "lora": {"lora": LoRAConfig(rank=3, dropout=0.2)}}
"""Of odd shards; dropout draws from torch's generators."""


def make(path: str, *, seed: int = 0, **changes: Any) -> FSDPLMEngine:
    optimizer = OptimizerConfig(**OPTIMIZER | {"weight_decay": 0.1}, lr_scheduler_type="linear")
    engine = FSDPLMEngine(train_config(path, optimizer=optimizer, seed=seed, **changes))
    engine.initialize(None, FinetuneSpec(1, 40, 4))
    return engine


def resume(engine: FSDPLMEngine, first: int, snapshots: list[bytes] | None = None) -> list[dict[str, Any]]:
    """Return what this rank holds after each update; take a snapshot before each."""
    found = []
    for step in range(first, UPDATES):
        if snapshots is not None:
            snapshots.append(pickle.dumps(engine.snapshot()))
        metrics = engine.train_lm(token_batch([9, 4, 12, 3, 7], seed=step)[SHARES[dist.get_rank()]])
        engine.set_version(step + 1)
        shards = [parameter.to_local().clone() for parameter in engine.model.parameters()]
        trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
        moments = [engine.optimizer.state[one][name].to_local().clone() for one in trained for name in MOMENTS]
        numbers = [engine.num_changes, engine.get_version(), engine.lr_schedule.num_steps, *of_update(metrics).values()]
        draws = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        found.append({"shards": shards + moments, "numbers": numbers + draws})
    return found


def on_each_rank(_: Connection, path: str) -> None:
    torch.set_num_threads(1)
    for changes in CONFIGS.values():
        snapshots: list[bytes] = []
        outcomes = []
        for taken in (None, snapshots):
            engine = make(path, **changes)
            outcomes.append(resume(engine, 0, taken))
            engine.destroy()
        undisturbed, expected = outcomes
        assert_same(expected, undisturbed)
        assert len({str(one["numbers"]) for one in expected}) == UPDATES
        engine = make(path, seed=7, **changes)
        for first in (1, 0):  # in a new engine, and in one whose updates are undone
            engine.restore(pickle.loads(snapshots[first]))
            assert engine.get_version() == first
            assert_same(resume(engine, first), expected[first:])
        engine.destroy()


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [one["numbers"] for one in found] == [one["numbers"] for one in expected]
    for ours, others in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours["shards"], others["shards"], strict=True))


def test_two_ranks_continue_from_their_snapshots(lm_path: str) -> None:
    with testing_forks.two_ranks(on_each_rank, lm_path) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]


def test_a_snapshot_of_another_rank_is_refused(lm_path: str) -> None:
    engine = make(lm_path)
    taken = engine.snapshot()
    assert all(not isinstance(one, torch.Tensor) for one in taken["state"]["model"].values())
    with pytest.raises(CheckpointError, match="a snapshot for rank 0 of 1 must be its own: got one of rank 1 of 2"):
        engine.restore(taken | {"rank": "1 of 2"})
    engine.destroy()

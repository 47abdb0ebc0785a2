"""The real executor against an adversary that decides which episode ends next, and how."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from testing_adversary import RETRIES, CorneredExecutor, HeldWorkflow
from testing_workflows import IdleEngine

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import PromptId

_VERSIONS = 10


class Run:
    """A trainer of `_VERSIONS` batches that keeps books of its own."""

    def __init__(self, rng: random.Random, straggler_share: float, **config: Any) -> None:
        config |= {"episode_retries": RETRIES, "episode_timeout": 600.0, "max_failed_share": 1.0}
        self.engine = IdleEngine(InferenceEngineConfig(**config), CorneredExecutor)
        self.executor = self.engine.executor
        assert isinstance(self.executor, CorneredExecutor)
        self.workflow = self.executor.adversary = HeldWorkflow(rng, straggler_share)
        self.issued: list[int] = []
        self.consumed: list[int] = []
        self.staleness: list[int] = []

    def loader(self, num_rows: int) -> Iterator[list[dict[str, Any]]]:
        for first in itertools.count(0, num_rows):
            indices = range(first, first + num_rows)
            self.issued += indices
            yield [{"prompt_id": PromptId(0, index)} for index in indices]

    def train(self, batch: TensorDict) -> None:
        versions = batch["versions"][batch["loss_mask"].bool()]
        self.staleness += (self.engine.version - versions).tolist()
        self.consumed += batch["input_ids"][:, 0].tolist()
        self.executor.loop.run(self.workflow.end_some())
        self.engine.set_version(self.engine.version + 1)
        assert self.executor.stats.rejected == len(self.workflow.rejected), "none is dropped for its age"

    def num_pending(self) -> int:
        return len(self.issued) - len(self.consumed) - len(self.workflow.rejected) - len(self.workflow.failed)

    def go(self, num_rows: int) -> None:
        """Train, then consume what is pending."""
        loader = self.loader(num_rows)
        for _ in range(_VERSIONS):
            self.train(self.executor.prepare_batch(loader, self.workflow, lambda one: bool(one["rewards"][0] > 0)))
        self.workflow.is_kind = True
        while num_pending := self.num_pending():
            self.train(self.executor.wait(min(num_pending, self.executor.config.consumer_batch_size)))


@given(
    eta=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    num_rows=st.integers(1, 5),
    max_concurrent=st.sampled_from([2, 5, 64]),
    straggler_share=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_no_order_of_endings_breaks_the_bound_or_loses_a_prompt(
    eta: int, seed: int, batch_size: int, num_rows: int, max_concurrent: int, straggler_share: float
) -> None:
    torch.set_num_threads(1)
    run = Run(
        random.Random(seed),
        straggler_share,
        consumer_batch_size=batch_size,
        max_head_offpolicyness=eta,
        max_concurrent_rollouts=max_concurrent,
    )
    with contextlib.closing(run.executor):
        run.go(num_rows)
    assert len(run.staleness) == 2 * len(run.consumed) and min(run.staleness) >= 0 and max(run.staleness) <= eta
    stats, workflow = run.executor.stats, run.workflow
    assert sorted(run.consumed + workflow.rejected + workflow.failed) == run.issued == list(range(len(run.issued)))
    assert (stats.submitted, stats.accepted, stats.failed, stats.running) == (
        len(run.issued),
        len(run.consumed),
        len(workflow.failed),
        0,
    )

"""The executor with real event loops and workflows that need no server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from testing_rollouts import stored_rows
from testing_workflows import IdleEngine, WaitingWorkflow, waiting_trajectory

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import (
    ContextOverflowError,
    EnvError,
    EpisodeError,
    EpisodeTimeoutError,
    ParseError,
    RewardError,
    ServerError,
    UnreachableError,
)
from arealite.api.io_struct import ModelRequest, PromptId
from arealite.dataset.loader import Mixture, PromptLoader
from arealite.dataset.rows import Rows
from arealite.rollout import executor as executor_module
from arealite.rollout.account.audit import audit
from arealite.rollout.account.store import RolloutStore, read_batches
from arealite.rollout.prompts import current_episode, sampling_seed
from arealite.rollout.trajectory import assemble_batch, has_spread
from arealite.utils import stop
from arealite.utils.tensors import concat_padded_tensors

Row = dict[str, Any]
Start = Callable[..., IdleEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    torch.set_num_threads(1)
    engines: list[IdleEngine] = []

    def start_engine(**config: Any) -> IdleEngine:
        engines.append(IdleEngine(InferenceEngineConfig(**config)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.executor.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("arealite")]


def rows(count: int, first: int = 0, **columns: Any) -> list[Row]:
    return [{"prompt_id": PromptId(0, index), **columns} for index in range(first, first + count)]


def prompts_of(batch: TensorDict) -> list[int]:
    return batch["input_ids"][:, 0].tolist()  # type: ignore[no-any-return]


# Batches


def test_synchronous_batches_are_the_data_in_order(start: Start) -> None:
    engine = start(consumer_batch_size=3, max_head_offpolicyness=0)
    data = [rows(2, first) for first in (0, 2, 4)]
    for version, expected in enumerate([[0, 1, 2], [3, 4, 5], [0, 1, 2]]):
        batch = engine.executor.prepare_batch(data, WaitingWorkflow())
        assert prompts_of(batch) == expected
        assert batch["versions"].max() == version
        engine.set_version(version + 1)


def test_rows_without_a_name_get_pass_and_index(start: Start) -> None:
    engine = start(consumer_batch_size=3, max_head_offpolicyness=0)
    workflow, data = WaitingWorkflow(), [[{"a": 1}], [{"a": 2}]]
    engine.executor.prepare_batch(data, workflow)
    assert workflow.started == [PromptId(0, 0), PromptId(0, 1), PromptId(1, 0)]
    assert data == [[{"a": 1}], [{"a": 2}]], "the caller's rows are not changed"


def test_a_batch_beyond_the_bound_is_refused_instead_of_hanging(start: Start) -> None:
    engine = start(consumer_batch_size=2, max_head_offpolicyness=1)
    loader = [rows(4)]
    engine.executor.prepare_batch(loader, WaitingWorkflow())
    engine.executor.prepare_batch(loader, WaitingWorkflow())
    with pytest.raises(RuntimeError, match="call set_version"):
        engine.executor.prepare_batch(loader, WaitingWorkflow())
    engine.set_version(1)
    engine.executor.prepare_batch(loader, WaitingWorkflow())


def test_errors_of_the_dataloader_reach_the_caller(start: Start) -> None:
    engine = start(consumer_batch_size=2)

    def broken() -> Iterator[list[Row]]:
        yield rows(1)
        raise OSError("disk on fire")

    loader = broken()
    with pytest.raises(OSError, match="disk on fire"):
        engine.executor.prepare_batch(loader, WaitingWorkflow())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the dataloader must not fail: .* OSError: disk on fire") as caught:
            engine.executor.prepare_batch(loader, WaitingWorkflow())
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ([], "must yield rows"),
        ([{"question": ["a", "b"]}], r"rows must come as a list of dicts: got one that is 'question'\."),  # as torch's
        ([["question"]], r"rows must come as a list of dicts: got one that is 'question'\."),
        ([[{"prompt_id": "0012ab"}]], "the column prompt_id of a row must be a PromptId: got '0012ab'. Rename"),
    ],
)
def test_what_yields_no_rows_is_refused(start: Start, loader: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        start().executor.prepare_batch(loader, WaitingWorkflow())


def test_a_dataloader_may_note_where_it_is_in_words_of_its_own(start: Start) -> None:
    """That of torchdata holds the state of a random generator."""

    class Loader(list[list[Row]]):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": torch.Generator().get_state()}

    assert len(start(consumer_batch_size=1).executor.prepare_batch(Loader([rows(1)]), WaitingWorkflow())) == 1


def test_a_run_has_one_dataloader(start: Start) -> None:
    """Those of two would share names."""
    engine = start(consumer_batch_size=1)
    first = [[{"a": 1}]]
    engine.executor.prepare_batch(first, WaitingWorkflow())
    with pytest.raises(ValueError, match=r"must get one dataloader in a run: got a second one, list.*one data set"):
        engine.executor.prepare_batch([[{"a": 1}]], WaitingWorkflow())
    engine.set_version(1)
    engine.executor.prepare_batch(first, WaitingWorkflow())


def test_versions_that_passed_without_consuming_drop_the_overdue(start: Start) -> None:
    engine = start(consumer_batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=8)
    loader = (rows(2, first) for first in itertools.count(0, 2))
    workflow = WaitingWorkflow()
    assert prompts_of(engine.executor.prepare_batch(loader, workflow)) == [0, 1]
    engine.set_version(1)
    engine.set_version(2)
    batch = engine.executor.prepare_batch(loader, workflow)
    assert 2 - batch["versions"][batch["loss_mask"].bool()].min() <= 1
    assert engine.executor.stats.rejected == 2  # head 0, finished and due at version 1


# submit and wait


def test_wait_takes_the_oldest_first_and_loses_nothing_on_timeout(start: Start) -> None:
    engine = start(consumer_batch_size=4, max_head_offpolicyness=9, max_concurrent_rollouts=4)
    for row in rows(3):
        engine.executor.submit({**row, "delay_s": 1.5 if row["prompt_id"].index == 1 else 0.0}, WaitingWorkflow())
    with pytest.raises(TimeoutError, match="got 2 finished, 1 running"):
        engine.executor.wait(3, timeout=0.5)
    assert prompts_of(engine.executor.wait(3)) == [0, 1, 2]


def test_wait_filters(start: Start) -> None:
    engine = start(consumer_batch_size=6)
    for row in rows(6):
        engine.executor.submit(row, WaitingWorkflow())
    batch = engine.executor.wait(3, should_accept=lambda one: bool(one["rewards"][0] >= 3))
    assert prompts_of(batch) == [3, 4, 5]
    with pytest.raises(RuntimeError, match="none running"):
        engine.executor.wait(1)


def test_the_queue_is_bounded(start: Start) -> None:
    engine = start(consumer_batch_size=1, queue_size=2)
    engine.executor.pause()
    engine.executor.submit({}, WaitingWorkflow())
    engine.executor.submit({}, WaitingWorkflow())
    with pytest.raises(RuntimeError, match="queue_size = 2"):
        engine.executor.submit({}, WaitingWorkflow())


def test_pause_stops_new_episodes_only(start: Start) -> None:
    engine = start(consumer_batch_size=4)
    workflow = WaitingWorkflow()
    engine.executor.submit({"delay_s": 0.05}, workflow)
    engine.executor.pause()
    engine.executor.submit({}, workflow)
    with pytest.raises(TimeoutError):
        engine.executor.wait(2, timeout=0.2)
    assert len(workflow.started) == 1
    assert prompts_of(engine.executor.run_all(rows(1), workflow)) == [0]  # unthrottled batches still run
    engine.executor.resume()
    assert len(engine.executor.wait(2)) == 2


# Failures


def fail_first(error: BaseException, attempts: int) -> WaitingWorkflow:
    """Fail that many attempts at each prompt."""
    counts: dict[PromptId, int] = {}

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        counts[row["prompt_id"]] = counts.get(row["prompt_id"], 0) + 1
        if counts[row["prompt_id"]] <= attempts:
            raise error
        return waiting_trajectory(row["prompt_id"].index, engine.get_version())

    return WaitingWorkflow(act)


def test_a_failure_is_retried_in_a_fresh_attempt(start: Start) -> None:
    engine = start(consumer_batch_size=2)
    batch = engine.executor.prepare_batch([rows(2)], fail_first(OSError("flaky"), 1))
    assert prompts_of(batch) == [0, 1]
    assert engine.executor.stats.failed == 0


class SecondPromptFails(WaitingWorkflow):
    """Prompt 1 fails after a while, and its next attempt does not end in time."""

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
        episode = current_episode.get()
        assert episode is not None
        if episode.prompt_id.index == 1:
            await asyncio.sleep(0.1 if episode.attempt == 0 else 60.0)
            raise OSError("flaky")
        return await super().arun_episode(engine, data)


def test_a_batch_that_a_retry_allows_is_taken_at_once(start: Start) -> None:
    """Prompt 1 is due at version 1 until it fails; then its retry is due at 2."""
    engine = start(consumer_batch_size=1, max_head_offpolicyness=1, max_concurrent_rollouts=4, episode_timeout=30.0)
    loader = (rows(1, first) for first in itertools.count())
    assert prompts_of(engine.executor.prepare_batch(loader, SecondPromptFails())) == [0]
    engine.set_version(1)
    assert prompts_of(engine.executor.prepare_batch(loader, SecondPromptFails())) == [2]
    assert engine.executor.stats.failed == 0, "the retry still runs"


def test_a_retry_is_a_sign_of_life(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts that time out last longer than one may stall."""
    monkeypatch.setattr(executor_module, "_GRACE_S", 1.4)
    engine = start(consumer_batch_size=1, episode_timeout=1.5, episode_retries=2)

    class ThirdTimeLucky(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            delay_s = 60.0 if len(self.started) < 2 else 0.0
            return await super().arun_episode(engine, {**data, "delay_s": delay_s})

    assert prompts_of(engine.executor.prepare_batch([rows(1, first=5)], ThirdTimeLucky())) == [5]


def test_a_wait_without_any_sign_of_life_gives_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "_GRACE_S", 0.1)
    engine = start(consumer_batch_size=1, episode_timeout=0.1)
    engine.executor.pause()
    with pytest.raises(EpisodeTimeoutError, match=r"every 0.2 s: got none, with 0 running, 1 waiting to start, paused"):
        engine.executor.prepare_batch([rows(1)], WaitingWorkflow())


@pytest.mark.parametrize("call", ["prepare_batch", "run_all"])
def test_a_wait_does_not_give_up_while_an_attempt_has_time(
    start: Start, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Its clock may have stood still for want of servers, so that it ends later than it would have."""
    monkeypatch.setattr(executor_module, "_GRACE_S", -599.9)
    engine = start(consumer_batch_size=1, episode_timeout=600.0)
    prompts = rows(1, delay_s=1.0)
    if call == "run_all":
        batch = engine.executor.run_all(prompts, WaitingWorkflow(), is_evaluation=True)
    else:
        batch = engine.executor.prepare_batch([prompts], WaitingWorkflow())
    assert prompts_of(batch) == [0]


def test_an_attempt_has_sampling_seeds_of_its_own(start: Start) -> None:
    """Else a retry would draw the tokens that failed once more."""
    engine = start(consumer_batch_size=1, seed=3)
    seeds: list[int] = []

    class Sampling(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            episode = current_episode.get()
            assert episode is not None
            seeds.extend(episode.next_sample(ModelRequest([1]))[1] for _ in range(2))
            if episode.attempt == 0:
                raise OSError("flaky")
            return await super().arun_episode(engine, data)

    for prepare in (engine.executor.prepare_batch, lambda data, workflow: engine.executor.run_all(data[0], workflow)):
        seeds.clear()
        prepare([rows(1)], Sampling())
        assert seeds == [
            sampling_seed(3, PromptId(0, 0), sample=sample, attempt=attempt) for attempt in (0, 1) for sample in (0, 1)
        ]
        assert len(set(seeds)) == 4


def test_a_retry_waits_while_paused(start: Start) -> None:
    engine = start(consumer_batch_size=1)
    workflow = fail_first(OSError("flaky"), 1)
    engine.executor.submit({"delay_s": 0.1}, workflow)
    engine.executor.pause()
    with pytest.raises(TimeoutError):
        engine.executor.wait(1, timeout=0.3)
    assert len(workflow.started) == 1
    engine.executor.resume()
    engine.executor.wait(1)
    assert len(workflow.started) == 2


@pytest.mark.parametrize("error", [ContextOverflowError("no"), ExceptionGroup("tasks", [ContextOverflowError("no")])])
def test_a_prompt_that_is_too_long_is_not_tried_again(start: Start, error: Exception) -> None:
    engine = start(consumer_batch_size=1, episode_retries=3)
    workflow = WaitingWorkflow()

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        if row["prompt_id"].index == 0:
            raise error
        return waiting_trajectory(row["prompt_id"].index, 0)

    workflow.act = act
    assert prompts_of(engine.executor.prepare_batch([rows(2)], workflow)) == [1]
    assert workflow.started.count(PromptId(0, 0)) == 1


@pytest.mark.parametrize("by", ["workflow", "filter"])
def test_rejecting_everything_ends_in_an_error(start: Start, by: str) -> None:
    engine = start(consumer_batch_size=2, max_rejected_in_a_row=7)
    workflow = WaitingWorkflow((lambda engine, row: None) if by == "workflow" else WaitingWorkflow().act)
    with pytest.raises(EpisodeError, match=rf"at most 7 episodes must be rejected .* got 8 \(8 rejected by {by}\)"):
        engine.executor.prepare_batch([rows(4)], workflow, should_accept=lambda one: False)
    with pytest.raises(EpisodeError, match="got 8"):
        engine.executor.wait(1)


@pytest.mark.parametrize("should_accept", [None, lambda one: True])
def test_rejections_between_accepted_episodes_are_no_error(
    start: Start, should_accept: Callable[[TensorDict], bool] | None
) -> None:
    engine = start(consumer_batch_size=4, max_rejected_in_a_row=7)
    workflow = WaitingWorkflow(
        lambda engine, row: None if row["prompt_id"].index % 6 else waiting_trajectory(row["prompt_id"].index, 0)
    )
    loader = (rows(6, first) for first in itertools.count(0, 6))
    assert prompts_of(engine.executor.prepare_batch(loader, workflow, should_accept)) == [0, 6, 12, 18]
    assert engine.executor.metrics()["rollout/rejected_workflow"] == engine.executor.stats.rejected >= 15


def test_dynamic_sampling_replaces_groups_without_spread_and_tells_the_reward_of_all(
    start: Start,
) -> None:
    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        group = concat_padded_tensors([waiting_trajectory(row["prompt_id"].index, 0)] * 2)
        group["rewards"] = torch.tensor([0.75, 0.75] if row["prompt_id"].index % 3 else [1.0, 0.0])
        return group

    engine = start(consumer_batch_size=2, max_head_offpolicyness=0)
    loader = (rows(2, first) for first in itertools.count(0, 2))
    batch = engine.executor.prepare_batch(loader, WaitingWorkflow(act), has_spread)
    assert prompts_of(batch)[::2] == [0, 3] and batch["rewards"].tolist() == [1.0, 0.0] * 2
    num_rejected = engine.executor.stats.rejected
    assert num_rejected >= 2
    expected = (4 * 0.5 + num_rejected * 1.5) / (4 + num_rejected * 2)
    metrics = engine.executor.metrics()
    assert metrics["reward/sampled_mean"] == pytest.approx(expected)
    assert metrics["reward/other_max"] == 1.0, "of a rejected group"
    assert "reward/sampled_mean" not in engine.executor.metrics(), "told once"


def test_the_rewards_of_a_batch_are_told_by_source_of_a_mixture(start: Start) -> None:
    """Evaluations do not count."""

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        group = concat_padded_tensors([waiting_trajectory(row["prompt_id"].index, 0)] * 2)
        group["rewards"] = torch.tensor([0.0, 1.0]) + row["source"]
        return group

    parts = [Rows([{"source": part, "row": row} for row in range(3)], checksum=part) for part in range(2)]
    loader = PromptLoader(Mixture(parts, None, 1, ["first", "second"]), 2, shuffle=False)
    engine, workflow = start(consumer_batch_size=2, max_head_offpolicyness=0), WaitingWorkflow(act)
    expected = [{"first": 0.5}, {"first": 0.5, "second": 1.5}, {"second": 1.5}, {"first": 0.5}]
    for version, means in enumerate(expected, start=1):
        batch = engine.executor.prepare_batch(loader, workflow)
        assert batch["rewards"].mean() == sum(means.values()) / len(means)
        engine.executor.run_all([loader.fetch(PromptId(0, index)) for index in (1, 5)], workflow, is_evaluation=True)
        metrics = engine.executor.metrics()
        assert {key: metrics[key] for key in metrics if key.startswith("reward/mean")} == {
            f"reward/mean/{name}": mean for name, mean in means.items()
        }
        engine.set_version(version)


def test_failures_long_ago_are_forgiven(start: Start) -> None:
    """A share of the recent episodes may fail for ever; the same number at once stops the run."""
    engine = start(consumer_batch_size=5, episode_retries=0, failure_window=10, max_failed_share=0.2)
    workflow = WaitingWorkflow()

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        if row["prompt_id"].index % 6 == 0:
            raise OSError("every sixth")
        return waiting_trajectory(row["prompt_id"].index, 0)

    workflow.act = act
    loader = (rows(6, first) for first in itertools.count(0, 6))
    for version in range(8):
        engine.executor.prepare_batch(loader, workflow)
        engine.set_version(version + 1)
    assert engine.executor.stats.failed >= 8


@pytest.mark.parametrize(("overdue", "taken_at_2"), [("drop", [3]), ("train", [0]), ("wait", [0])])
def test_policies_for_the_overdue(start: Start, overdue: str, taken_at_2: list[int]) -> None:
    """Prompt 0 starts at version 0 and ends after version 1 began; the bound is 0 or 1."""
    engine = start(
        consumer_batch_size=1,
        max_head_offpolicyness=1,
        max_concurrent_rollouts=8,
        overdue=overdue,
        episode_timeout=120.0,
    )
    ended = threading.Event()
    cancelled: list[int] = []
    first_has_ended = threading.Event()

    class FirstIsSlow(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            index = data["prompt_id"].index
            try:
                version = engine.get_version()
                while index == 0 and not ended.is_set():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                cancelled.append(index)
                raise
            finally:
                first_has_ended.set() if index == 0 else None
            return waiting_trajectory(index, version)

    loader = (rows(1, first) for first in itertools.count())
    workflow = FirstIsSlow()
    assert prompts_of(engine.executor.prepare_batch(loader, workflow)) == [1]
    engine.set_version(1)
    if overdue == "wait":
        engine.executor.submit({"prompt_id": PromptId(9, 9)}, workflow)
        with pytest.raises(TimeoutError):
            engine.executor.wait(1, timeout=0.3)
        ended.set()
        assert prompts_of(engine.executor.wait(1)) == [0]
        assert engine.executor.stats.rejected == 0
        return
    assert prompts_of(engine.executor.prepare_batch(loader, workflow)) == [2]
    engine.set_version(2)
    ended.set()
    assert first_has_ended.wait(120)
    engine.executor.loop.run(asyncio.sleep(0.01))  # in which the executor learns of it
    assert prompts_of(engine.executor.prepare_batch(loader, workflow)) == taken_at_2
    assert engine.executor.metrics().get("rollout/rejected_overdue", 0) == (overdue == "drop")
    assert cancelled == ([0] if overdue == "drop" else [])


class Panic(BaseException):
    """What libraries written in Rust raise."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RewardError("no"), "reward_exception"),
        (RewardError("no", kind="contract"), "reward_contract"),
        (ServerError("no"), "server_error"),
        (UnreachableError("no"), "server_unreachable"),
        (ContextOverflowError("no"), "context_overflow"),
        (EnvError("no"), "environment"),
        (ParseError("no"), "parse"),
        (ZeroDivisionError("no"), "workflow"),
        (TimeoutError("the user's own"), "workflow"),
        (ExceptionGroup("several", [RewardError("no", kind="timeout")]), "reward_timeout"),
        (asyncio.CancelledError(), "workflow"),
        (Panic("in a library written in Rust"), "workflow"),
        (GeneratorExit(), "workflow"),
        (BaseExceptionGroup("several", [BaseExceptionGroup("inner", [Panic("no")]), ParseError("no")]), "workflow"),
    ],
)
def test_dropped_episodes_are_counted_by_kind(start: Start, error: BaseException, kind: str) -> None:
    engine = start(consumer_batch_size=2, episode_retries=1, episode_timeout=60)

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        if row["prompt_id"].index == 0:
            raise error
        return waiting_trajectory(row["prompt_id"].index, 0)

    batch = engine.executor.prepare_batch([rows(6)], WaitingWorkflow(act))
    assert prompts_of(batch) == [1, 2]
    assert engine.executor.metrics()[f"rollout/failed_{kind}"] == engine.executor.stats.failed == 1


class CancellingWorkflow(WaitingWorkflow):
    """Cancels its own task for the first two prompts, and fails for the third one as its deadline ends it."""

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
        index, task = data["prompt_id"].index, asyncio.current_task()
        assert task is not None
        if index < 2:
            task.cancel()
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:  # as a library does that never calls `uncancel`
                if index == 0:
                    raise
            await asyncio.sleep(3600)
        if index == 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise ValueError("no reply") from None
        return await super().arun_episode(engine, data)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_a_workflow_that_meddles_with_cancellations_fails_its_prompt_only(start: Start, is_evaluation: bool) -> None:
    more = {"max_head_offpolicyness": 9, "max_failed_share": 1.0}
    engine = start(consumer_batch_size=2, max_concurrent_rollouts=5, episode_retries=0, episode_timeout=3.0, **more)
    workflow = CancellingWorkflow()
    if is_evaluation:
        batch = engine.executor.run_all(rows(5), workflow, is_evaluation=True)
    else:
        for row in rows(5):
            engine.executor.submit(row, workflow)
        batch = engine.executor.wait(2)
        while engine.executor.stats.running:
            time.sleep(0.01)
        metrics = engine.executor.metrics()
        assert (metrics["rollout/failed_workflow"], metrics["rollout/failed_timeout"]) == (1, 2)
    assert prompts_of(batch) == [3, 4]


@pytest.mark.parametrize("error", [ZeroDivisionError("reward / 0"), Panic("reward / 0")], ids=repr)
@pytest.mark.parametrize("call", ["prepare_batch", "wait", "run_all"])
def test_too_many_failures_stop_the_run_with_their_cause(start: Start, call: str, error: BaseException) -> None:
    engine = start(
        consumer_batch_size=2, max_failed_share=0.3, failure_window=10, episode_retries=0, max_concurrent_rollouts=2
    )
    workflow = fail_first(error, 10**9)
    calls = {
        "prepare_batch": lambda: engine.executor.prepare_batch([rows(2)], workflow),
        "wait": lambda: [engine.executor.submit(row, workflow) for row in rows(6)] and engine.executor.wait(2),
        "run_all": lambda: engine.executor.run_all(rows(6), workflow),
    }
    with pytest.raises(
        EpisodeError,
        match=r"(?s)at most 3 of the last 10 .* got [4-6]\."
        rf".*\n[4-6] x workflow: {type(error).__name__}: reward / 0, at \S+:\d+ in .*$",
    ) as caught:
        calls[call]()
    assert caught.value.__cause__ is error
    with pytest.raises(EpisodeError):
        engine.executor.wait(1)


def test_a_cause_that_all_first_episodes_share_ends_the_run(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Within the budget, which would let fifty of them fail; it is told once in ten."""

    def score(engine: InferenceEngine, row: Row) -> TensorDict:
        return undefined  # type: ignore[name-defined]  # noqa: F821

    engine = start(consumer_batch_size=4, max_failed_share=0.5, episode_retries=2)
    line = inspect.getsourcelines(score)[1] + 1
    with pytest.raises(EpisodeError) as caught:
        engine.executor.prepare_batch([rows(4)], WaitingWorkflow(score))
    first, cause = str(caught.value).split("\n")
    assert first == "the first 4 episodes must not all fail: got one cause for all. Fix it."
    assert f"4 x workflow: NameError: name 'undefined' is not defined, at {__file__}:{line} in " in cause
    assert len(caplog.messages) == 2 and "(10 alike so far)" in caplog.messages[1]


@pytest.mark.parametrize(
    "other", [None, UnreachableError("no server"), ExceptionGroup("tasks", [UnreachableError("no server")])]
)
def test_first_episodes_that_fail_otherwise_leave_the_rest_to_the_budget(start: Start, other: Exception | None) -> None:
    def act(engine: InferenceEngine, row: Row) -> TensorDict | None:
        if other is not None:
            raise other
        return None if row["prompt_id"].index == 0 else waiting_trajectory(12 // 0, 0)

    engine = start(consumer_batch_size=4, max_failed_share=0.9, episode_retries=0)
    with pytest.raises(EpisodeError, match="got none"):
        engine.executor.run_all(rows(8), WaitingWorkflow(act))


def test_failures_that_a_budget_allows_for_ever_end_with_their_cause(start: Start) -> None:
    """Also in turn with rejections; who has never reached a server is not counted."""

    def act(engine: InferenceEngine, row: Row) -> None:
        if row["prompt_id"].index % 3 == 0:
            raise UnreachableError("no server")
        if row["prompt_id"].index % 3 == 1:
            raise OSError("the disk is full")

    engine = start(consumer_batch_size=2, max_failed_share=1.0, episode_retries=0, max_concurrent_rollouts=1)
    loader = (rows(3, first) for first in itertools.count(0, 3))
    with pytest.raises(EpisodeError) as caught:
        engine.executor.prepare_batch(loader, WaitingWorkflow(act))
    told, *causes = str(caught.value).split("\n")
    found = re.fullmatch(
        r"at most 40 episodes must be rejected or fail with none accepted in between: got (\d+) \((\d+) failed, (\d+) "
        r"rejected by workflow\)\. Look at why, or raise rollout\.max_rejected_in_a_row\.",
        told,
    )
    assert found is not None, told
    total, failed, rejected = map(int, found.groups())
    assert 41 <= total == failed + rejected, "some may end before the thread that waits is told"
    assert failed - rejected in (0, 1)
    assert any("OSError: the disk is full" in cause for cause in causes)


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        for token in tokens:
            token.to_bytes(4, "big")  # as one in C does, it refuses others
        return " ".join(map(str, tokens))


def changed(**columns: Any) -> Callable[[TensorDict], TensorDict]:
    def change(trajectory: TensorDict) -> TensorDict:
        for key, value in columns.items():
            trajectory[key] = value
        return trajectory

    return change


def kept(ids: list[Any], counts: list[Any]) -> Callable[[TensorDict], TensorDict]:
    return changed(kept_ids=torch.tensor(ids), kept_counts=torch.tensor(counts))


def with_batch_size(*batch_size: int) -> Callable[[TensorDict], TensorDict]:
    return lambda one: TensorDict(dict(one.items()), batch_size=batch_size)


MALFORMED: dict[str, tuple[Callable[[TensorDict], Any], str]] = {
    "a dict": (lambda one: {"input_ids": [1]}, "must return a TensorDict or None: got dict"),
    "keys are missing": (lambda one: one.exclude("logprobs", "rewards"), "got no logprobs, rewards"),
    "a key that others lack": (
        changed(turns=torch.ones(1)),
        "the keys, dtypes and dimensions of the first .*: got other turns",
    ),
    "a key that others have": (lambda one: one.exclude("no_eos"), "of the first .*: got other no_eos"),
    "a key of another dtype": (
        lambda one: one.update({"input_ids": one["input_ids"].int()}),
        "of the first .*: got other input_ids. Return the same keys and types",
    ),
    "a key of other dimensions": (changed(extra=torch.ones(1, 3)), "of the first .*: got other extra"),
    "no batch_size": (with_batch_size(), r"must have a batch_size that begins with \[1\]: got \[\]"),
    "no rows": (lambda one: one[:0], r"\['input_ids'\] must be \[B, S\] with at least one row"),
    "no tokens": (
        lambda one: TensorDict({key: x[:, :0] if x.dim() > 1 else x for key, x in one.items()}, batch_size=[1]),
        "at least one row and token",
    ),
    "text": (changed(no_eos="yes"), r"\['no_eos'\] must be a real CPU tensor"),
    "with gradient": (changed(no_eos=torch.ones(1, requires_grad=True)), r"\['no_eos'\] must be a real CPU tensor"),
    "bfloat16": (
        changed(logprobs=torch.zeros(1, 3, dtype=torch.bfloat16)),
        r"\['logprobs'\] must be .* that numpy has",
    ),
    "metric nan": (changed(turns=torch.tensor([float("nan")])), r"\['turns'\] must be finite, as it is a metric"),
    "reward nan": (changed(rewards=torch.tensor([float("nan")])), r"\['rewards'\] must be finite: got nan"),
    "reward for each token": (changed(rewards=torch.zeros(1, 1)), r"\['rewards'\] must have the shape \[1\]"),
    "logprob -inf": (changed(logprobs=torch.tensor([[0.0, float("-inf"), 0.0]])), "'logprobs'.*got -inf"),
    "logprob 5": (changed(logprobs=torch.tensor([[0.0, 5.0, 0.0]])), "'logprobs'.*got 5"),
    "ids below 0": (changed(input_ids=torch.tensor([[1, -2, 3]])), r"\['input_ids'\] must be from 0 .*: got -2"),
    "huge ids": (changed(input_ids=torch.tensor([[1, 2**40, 3]])), rf"\['input_ids'\] must be from 0 .*: got {2**40}"),
    "ids that are floats": (changed(input_ids=torch.ones(1, 3)), r"\['input_ids'\] must be integers: got float32"),
    "mask of another shape": (changed(loss_mask=torch.zeros(1, 2)), r"'loss_mask'.*got \[1, 2\]"),
    "mask 2 and -1": (changed(loss_mask=torch.tensor([[0, 2, -1]])), r"\['loss_mask'\] must be 0 or 1: got 2"),
    "mask 0.5": (changed(loss_mask=torch.tensor([[0, 0.5, 1]])), r"\['loss_mask'\] must be 0 or 1: got 0.5"),
    "attention 2": (changed(attention_mask=torch.tensor([[1, 2, 1]])), r"\['attention_mask'\] must be 0 or 1: got 2"),
    "sampled padding": (changed(attention_mask=torch.tensor([[True, True, False]])), "sampled token in the padding"),
    "no version": (changed(versions=torch.tensor([[-1, 4, -1]])), r"\['versions'\] must be at least 4 .* got -1"),
    "an old version": (changed(versions=torch.tensor([[-1, 4, 3]])), "'versions'.*got 3"),
    "a version to come": (changed(versions=torch.tensor([[-1, 4, 999]])), "'versions'.*got 999"),
    "turn reward nan": (changed(turn_rewards=torch.full((1, 3), torch.nan)), r"\['turn_rewards'\] must be finite"),
    "turn rewards of another shape": (
        changed(turn_rewards=torch.zeros(1)),
        r"'turn_rewards'\] must have the shape \[1",
    ),
    "runs that are floats": (changed(sample_index=torch.zeros(1)), r"\['sample_index'\] must be int64: got float32"),
    "two rewards of a run": (
        lambda one: torch.cat([one, changed(rewards=torch.tensor([0.5]))(one.clone())]).set(
            "sample_index", torch.tensor([3, 3])
        ),
        "'rewards'.*got 0.5",
    ),
    "half of the kept sets": (changed(kept_ids=torch.ones(1, 2)), "got no kept_counts"),
    "kept sets of another shape": (kept([[1]], [[1, 0]]), r"\['kept_counts'\] must have the shape \[1, 3\]"),
    "kept ids that are floats": (kept([[1.0]], [[0, 1, 0]]), r"\['kept_ids'\] must be two-dimensional integers"),
    "kept ids below 0": (kept([[1, -1]], [[0, 2, 0]]), r"\['kept_ids'\] must be .* of at least 0"),
    "kept counts below 0": (kept([[1, 1]], [[0, 2, -1]]), r"\['kept_counts'\] must be .* of at least 0"),
    "a kept set of a first token": (kept([[1, 1]], [[1, 1, 0]]), r"\['kept_counts'\] must be 0 on first tokens"),
    "too few kept ids": (kept([[1, 1]], [[0, 1, 2]]), r"\['kept_ids'\] must have 3 ids in its longest row: got 2"),
    "a token outside its kept set": (kept([[1, 5, 6, 7]], [[0, 1, 3]]), "'kept_ids'.*got 1"),
    "a token twice in its kept set": (kept([[1, 1, 6]], [[0, 2, 1]]), r"must have each token once among its own"),
    "versions that are floats": (changed(versions=torch.full((1, 3), 4.0)), "'versions'.*got float"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_trajectory_fails_its_episode_alone(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[TensorDict], TensorDict],
    message: str,
) -> None:
    """What comes after it is written, decoded, joined and audited."""

    class Malformed(WaitingWorkflow):
        tokenizer = Tokenizer()

        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict:
            good = changed(extra=torch.ones(1))(waiting_trajectory(data["prompt_id"].index, 4))
            return change(good) if data["prompt_id"].index == 1 else good

    engine = start(episode_retries=0, consumer_batch_size=3, fileroot=str(tmp_path), experiment_name="exp")
    engine.set_version(4)
    with caplog.at_level("WARNING"):
        assert prompts_of(engine.executor.prepare_batch([rows(6)], Malformed())) == [0, 2, 3]
    engine.executor.close()
    assert engine.executor.metrics()["rollout/failed_trajectory"] == 1
    (text,) = [text for text in caplog.messages if "dropped" in text]
    assert text.startswith("episode 0-1 of Malformed failed in attempt 0 (trajectory)")
    assert re.search(message, text), text
    found = audit(tmp_path / "exp")
    assert found.is_clean and found.repeated_ids == []


@pytest.mark.parametrize("ahead", [1, 37])
def test_servers_may_be_ahead_of_the_run(start: Start, ahead: int) -> None:
    """By one between an update and its version; by any number where an earlier run has left them so."""

    class Ahead(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict:
            episode = current_episode.get()
            assert episode is not None
            episode.newest_version = ahead if ahead > 1 else episode.newest_version  # as the client notes it
            return waiting_trajectory(data["prompt_id"].index, ahead)

    assert start(consumer_batch_size=2).executor.prepare_batch([rows(2)], Ahead())["versions"].max() == ahead


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_workflows_of_one_run_may_have_other_keys(start: Start, is_evaluation: bool) -> None:
    engine = start(consumer_batch_size=1)
    for name in ("first", "second"):
        workflow = WaitingWorkflow(lambda _, row, name=name: changed(**{name: torch.ones(1)})(waiting_trajectory(0, 0)))
        assert name in engine.executor.run_all(rows(1), workflow, is_evaluation=is_evaluation)


@pytest.mark.filterwarnings("error:coroutine .* was never awaited", "error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_in_a_group", [False, True])
def test_a_dead_loop_raises_its_cause(start: Start, is_in_a_group: bool) -> None:
    engine = start(consumer_batch_size=1)
    interrupt = KeyboardInterrupt("from a workflow")

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        raise BaseExceptionGroup("several", [ParseError("no"), interrupt]) if is_in_a_group else interrupt

    loader = [rows(1)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended") as caught:
            engine.executor.prepare_batch(loader, WaitingWorkflow(act))
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_an_episode_whose_end_can_not_be_recorded_ends_the_run_at_once(start: Start) -> None:
    engine = start(consumer_batch_size=1)

    class Unrecordable(ParseError):
        @property
        def kind(self) -> str:  # type: ignore[override]
            raise LookupError("no kind")

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        raise Unrecordable

    with pytest.raises(RuntimeError, match="of an episode must not fail: got LookupError: no kind") as caught:
        engine.executor.prepare_batch([rows(1)], WaitingWorkflow(act))
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_blocking_call_from_a_workflow_is_refused(start: Start) -> None:
    engine = start(episode_retries=0, max_failed_share=0.0)
    with pytest.raises(EpisodeError, match="Await agenerate there instead"):
        engine.executor.prepare_batch([rows(1)], WaitingWorkflow(lambda _, row: engine.executor.wait(1)))


# Unthrottled batches


def test_run_all_ignores_the_bound_and_keeps_the_order(start: Start) -> None:
    engine = start(consumer_batch_size=1, max_concurrent_rollouts=2, episode_retries=0)
    running, most = 0, 0

    class Counting(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().arun_episode(engine, data)
            finally:
                running -= 1

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        if row["prompt_id"].index == 3:
            raise RewardError("no")
        return waiting_trajectory(row["prompt_id"].index, 0)

    data = [{"prompt_id": PromptId(0, index), "delay_s": 0.02 * (index % 2)} for index in (5, 3, 1, 4)]
    batch = engine.executor.run_all(data, Counting(act))
    assert prompts_of(batch) == [1, 4, 5] and batch["group_index"].tolist() == [0, 1, 2]
    assert most == 2
    with pytest.raises(EpisodeError, match="got none"):
        engine.executor.run_all(rows(1, first=3), Counting(act))


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_run_all_without_a_result_says_why(start: Start, is_evaluation: bool) -> None:
    def act(engine: InferenceEngine, row: Row) -> TensorDict | None:
        return undefined if row["prompt_id"].index else None  # type: ignore[name-defined]  # noqa: F821

    engine = start(consumer_batch_size=1, episode_retries=0)
    with pytest.raises(EpisodeError, match="rejected_workflow 1, failed_workflow 3") as caught:
        engine.executor.run_all(rows(4), WaitingWorkflow(act), is_evaluation=is_evaluation)
    text = str(caught.value)
    assert f"at least one of 4 {'evaluation' if is_evaluation else 'training'} prompts must be accepted" in text
    line = inspect.getsourcelines(act)[1] + 1
    assert f"\n3 x workflow: NameError: name 'undefined' is not defined, at {__file__}:{line} in " in text


def test_run_all_takes_old_tokens_only_for_evaluations(start: Start) -> None:
    engine = start(consumer_batch_size=1, episode_retries=0)
    engine.set_version(2)

    class OneVersionBehind(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict:
            return waiting_trajectory(data["prompt_id"].index, engine.get_version() - data["behind"])

    assert engine.executor.run_all(rows(1, behind=0), OneVersionBehind())["versions"].max() == 2
    evaluated = engine.executor.run_all(rows(2, behind=1), OneVersionBehind(), is_evaluation=True)
    assert prompts_of(evaluated) == [0, 1] and evaluated["versions"].max() == 1
    with pytest.raises(EpisodeError, match=r"got none .*failed_trajectory 2"):
        engine.executor.run_all(rows(2, behind=1), OneVersionBehind())


def test_an_evaluation_has_one_version(start: Start) -> None:
    """A server that was late with the weights answered one of three; it is asked again."""
    engine = start(consumer_batch_size=1)
    asked: list[int] = []

    class OneIsLate(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict:
            index = data["prompt_id"].index
            asked.append(index)
            is_late = index == 1 and (asked.count(1) == 1 or data["is_always_late"])
            return waiting_trajectory(index, 2 if is_late else 3)

    batch = engine.executor.run_all(rows(3, is_always_late=False), OneIsLate(), is_evaluation=True)
    assert prompts_of(batch) == [0, 1, 2] and sorted(asked) == [0, 1, 1, 2]
    assert set(batch["versions"][batch["loss_mask"].bool()].tolist()) == {3}
    with pytest.raises(EpisodeError, match="must use one version of the weights: got 3"):
        engine.executor.run_all(rows(3, is_always_late=True), OneIsLate(), is_evaluation=True)


def test_an_evaluation_loses_only_the_prompt_that_fails_when_it_runs_again(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(consumer_batch_size=1)
    asked: list[int] = []

    class OneIsLate(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            index = data["prompt_id"].index
            asked.append(index)
            if asked.count(1) == 2:
                return None
            return waiting_trajectory(index, 2 if index == 1 else 3)

    batch = engine.executor.run_all(rows(3), OneIsLate(), is_evaluation=True)
    assert prompts_of(batch) == [0, 2] and sorted(asked) == [0, 1, 1, 2]
    assert caplog.messages[-1] == "1 of 3 evaluation prompts have no result (rejected_workflow 1)"


def test_a_batch_gives_up_when_a_workflow_catches_what_ends_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "_GRACE_S", 0.1)
    engine, may_end = start(consumer_batch_size=1, episode_timeout=0.4, episode_retries=0), threading.Event()

    class Stubborn(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            while data["prompt_id"].index == 0 and not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
            return await super().arun_episode(engine, data)

    with pytest.raises(EpisodeTimeoutError, match=r"every 0.5 s: got none, with 1 running, .* look at the workflow"):
        engine.executor.run_all(rows(2), Stubborn())
    may_end.set()


def test_close_cancels_what_runs_and_nothing_starts_afterwards(start: Start) -> None:
    """Not even what would have started in the next turn of the loop."""
    engine = start(consumer_batch_size=1000)
    started: list[Row] = []
    ended: list[str] = []

    class Endless(WaitingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: Row) -> TensorDict | None:
            started.append(data)
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("cancelled")
            return None

    for row in rows(1000):
        engine.executor.submit(row, Endless())
    while len(started) < 64:
        time.sleep(0.001)
    engine.executor.close()
    num_started = len(started)
    assert len(ended) == num_started
    time.sleep(0.2)
    assert len(started) == num_started and engine.executor.stats.failed == engine.executor.stats.rejected == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.executor.wait(1)


# What is stored


def test_rollouts_are_stored(start: Start, tmp_path: Path) -> None:
    engine = start(
        consumer_batch_size=2,
        fileroot=str(tmp_path),
        experiment_name="exp",
        trial_name="trial",
        max_head_offpolicyness=0,
    )
    workflow = WaitingWorkflow()
    workflow.tokenizer = Tokenizer()  # type: ignore[attr-defined]
    loader = [rows(2)]
    engine.executor.prepare_batch(loader, workflow)
    engine.set_version(1)
    engine.executor.prepare_batch(loader, WaitingWorkflow())
    engine.executor.run_all(rows(1, first=7), workflow, is_evaluation=True)
    engine.executor.close()
    folder = tmp_path / "exp" / "trial" / "rollouts"
    assert sorted(path.name for path in folder.iterdir()) == ["eval_step_1", "step_0", "step_1"]
    assert stored_rows(folder / "step_0")[1] == {
        "prompt_id": "0-1",
        "row": 0,
        "num_rows": 1,
        "sample": 0,
        "attempt": 0,
        "segments": [{"given": "1"}, {"sampled": "1 1"}],
        "input_ids": [1, 1, 1],
        "logprobs": [0.0, -1.0, -1.0],
        "versions": [-1, 0, 0],
        "loss_mask": [0, 1, 1],
        "reward": 1.0,
        "server": "",
        "trained_step": 0,
        "batch": 0,
        "more": {"no_eos": False},
    }
    untexted = stored_rows(folder / "step_1")[0]
    assert untexted["segments"] is None and untexted["trained_step"] == 1
    (evaluated,) = stored_rows(folder / "eval_step_1")
    assert evaluated["prompt_id"] == "0-7" and evaluated["trained_step"] is None


def test_runs_of_several_rows_are_accounted_for_and_come_back_bit_for_bit(start: Start, tmp_path: Path) -> None:
    """Each episode has a run of one row and one of as many as its index says; the latter is rewarded."""

    def act(engine: InferenceEngine, row: Row) -> TensorDict:
        index = row["prompt_id"].index
        group = concat_padded_tensors([waiting_trajectory(index, 0, length) for length in range(2, index + 4)])
        group["sample_index"] = (torch.arange(len(group)) > 0).long()
        group["rewards"] = group["sample_index"].float()
        return group

    engine = start(consumer_batch_size=3, fileroot=str(tmp_path), experiment_name="e", trial_name="t")
    workflow = WaitingWorkflow(act)
    batches, loader = [], [rows(6)]
    for version in range(2):
        batches.append(engine.executor.prepare_batch(loader, workflow, has_spread))
        engine.set_version(version + 1)
    metrics = engine.executor.metrics()
    assert metrics["reward/sampled_mean"] == 0.5, "a run counts once"
    assert metrics["reward/other_max"] == 0.0
    engine.executor.close()
    found = audit(tmp_path / "e" / "t")
    assert found.is_clean and (found.trained, found.repeated, found.lost) == (6, 0, None)
    for version, batch in enumerate(batches):
        assert batch["group_index"].tolist() == [group for group in range(3) for _ in range(version * 3 + group + 2)]
        (trajectories,) = read_batches(tmp_path / f"e/t/rollouts/step_{version}")
        stored = assemble_batch(trajectories)
        assert sorted(stored.keys()) == sorted(batch.keys())
        assert all(torch.equal(stored[key], batch[key]) for key in stored.keys())  # noqa: SIM118


def test_latency_counts_from_the_first_attempt(start: Start, tmp_path: Path) -> None:
    engine = start(consumer_batch_size=1, fileroot=str(tmp_path), experiment_name="e", trial_name="t")
    engine.executor.prepare_batch([rows(1, delay_s=0.1)], fail_first(OSError("flaky"), 1))
    engine.executor.close()
    (part,) = audit(tmp_path / "e" / "t").bias[0].parts
    assert 0.19 < part.low < 30


def test_rows_without_a_name_get_new_names_after_a_recovery(start: Start, tmp_path: Path) -> None:
    config = {"fileroot": str(tmp_path), "experiment_name": "e", "trial_name": "t", "consumer_batch_size": 2}
    workflow, first = WaitingWorkflow(), start(**config)
    first.executor.run_all([{}, {}], workflow)
    state = first.executor.state_dict()
    first.executor.run_all([{}], workflow)  # undone, so its name is free again
    first.executor.close()
    second = start(**config)
    second.executor.load_state_dict(state)
    second.set_version(1)
    second.executor.run_all([{}, {}], workflow)
    assert [one.index for one in workflow.started] == [0, 1, 2, 2, 3]
    second.executor.close()
    found = audit(tmp_path / "e" / "t")
    assert (found.trained, found.repeated) == (4, 0)


def test_a_dataloader_that_cannot_fetch_is_refused_at_the_first_checkpoint(start: Start) -> None:
    """By its position alone nobody could tell later which row of the data a shuffled one yielded."""
    engine = start(consumer_batch_size=2)
    engine.executor.prepare_batch([rows(2)], WaitingWorkflow())
    with pytest.raises(ValueError, match=r"must name its rows and `fetch\(prompt_id\)` them: got list\."):
        engine.executor.state_dict()


def test_a_write_that_failed_raises_at_the_next_call(start: Start, tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "rollouts").write_text("a file where the folder should be")
    engine = start(consumer_batch_size=1, fileroot=str(tmp_path), experiment_name="exp", max_head_offpolicyness=9)
    loader = [rows(1)]
    engine.executor.prepare_batch(loader, WaitingWorkflow())
    with pytest.raises(OSError, match="rollouts"):
        for attempt in range(8):
            engine.executor.prepare_batch(loader, WaitingWorkflow())
            time.sleep(0.05 * 2**attempt)
    with pytest.raises(OSError, match="rollouts"):
        engine.executor.close()
    engine.executor.store = RolloutStore(None)


@pytest.mark.parametrize("call", ["prepare_batch", "run_all"])
def test_a_wait_ends_when_the_run_is_asked_to_stop(start: Start, call: str) -> None:
    """And what has run is neither consumed nor lost: the same prompts are there afterwards."""
    engine, workflow = start(consumer_batch_size=2), WaitingWorkflow()
    slow = [{**row, "delay_s": 3600.0} for row in rows(2)]
    loader = itertools.repeat(slow)

    def ask() -> None:
        while not workflow.started:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask)
    with stop.obeying():
        thread.start()
        with pytest.raises(stop.RunStopped) as stopped:
            if call == "prepare_batch":
                engine.executor.prepare_batch(loader, workflow)
            else:
                engine.executor.run_all(slow, workflow, is_evaluation=True)
        thread.join()
    assert stopped.value.code == 130
    if call == "prepare_batch":
        assert engine.executor.stats.running == 2 and engine.executor.stats.accepted == 0


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_staleness_of_every_token_is_bounded_with_stragglers(start: Callable[..., IdleEngine], eta: int) -> None:
    engine = start(consumer_batch_size=4, max_head_offpolicyness=eta, max_concurrent_rollouts=64)
    rng = random.Random(eta)
    loader = ([{"delay_s": 0.08 if rng.random() < 0.3 else 0.0}] * 3 for _ in itertools.count())
    seen: list[tuple[int, int]] = []
    for version in range(12):
        batch = engine.executor.prepare_batch(loader, WaitingWorkflow())
        versions = batch["versions"][batch["loss_mask"].bool()]
        assert version - versions.min() <= eta and versions.max() <= version
        assert batch["group_index"].tolist() == [0, 1, 2, 3]
        seen += [(version, prompt) for prompt in prompts_of(batch)]
        engine.set_version(version + 1)
    assert len(seen) == 48


def test_an_episode_has_a_deadline(start: Callable[..., IdleEngine]) -> None:
    engine = start(consumer_batch_size=1, episode_timeout=0.1, episode_retries=0, max_failed_share=0.0)
    with pytest.raises(EpisodeError, match=r"\d x timeout") as caught:
        engine.executor.prepare_batch([rows(1, delay_s=60.0)], WaitingWorkflow())
    assert isinstance(caught.value.__cause__, EpisodeTimeoutError)

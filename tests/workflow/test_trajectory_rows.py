"""Rows made by hand, and any sequence of a builder's calls: each sampled token is trained on exactly once."""

import asyncio
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.errors import TrajectoryError
from arealite.api.io_struct import ModelResponse
from arealite.rollout.trajectory import check_trajectory
from arealite.workflow.trajectory import (
    SampledTurn,
    TrajectoryBuilder,
    row_of_turns,
    sample_group,
    trajectory_from_response,
    trajectory_from_turns,
)

FIRST = ModelResponse([1, 2], [3, 9], [-0.5, -0.25], [4, 5], "stop", "", output_kept=[[3], [5, 9]])
SECOND = ModelResponse([1, 2, 3, 9, 6, 7], [8], [-1.0], [6], "length", "", output_kept=[[8]])


def test_of_a_conversation_only_what_was_sampled_is_trained_on() -> None:
    row = trajectory_from_turns([FIRST, SECOND], 0.5)
    assert row["input_ids"].tolist() == [[1, 2, 3, 9, 6, 7, 8]]
    assert row["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 0, 1]]
    assert row["logprobs"].tolist() == [[0, 0, -0.5, -0.25, 0, 0, -1]]
    assert row["versions"].tolist() == [[-1, -1, 4, 5, -1, -1, 6]]
    assert (row["kept_counts"].tolist(), row["kept_ids"].tolist()) == ([[0, 0, 1, 2, 0, 0, 1]], [[3, 5, 9, 8]])
    assert (row["rewards"].tolist(), row["no_eos"].tolist()) == ([0.5], [True])
    with pytest.raises(TrajectoryError, match=r"of the turns before it: got others in turn 2\. Make it with"):
        other = ModelResponse([1, 2, 3, 6], [8], [-1.0], [6], "stop", "")
        trajectory_from_turns([FIRST, other], 0.5)


def test_dtypes_of_a_trajectory() -> None:
    response = ModelResponse([1, 2], [3], [-0.25], [7], "length", "localhost:1")
    trajectory = trajectory_from_response(response, 0.5)
    assert {key: value.dtype for key, value in trajectory.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.int64,
        "logprobs": torch.float32,
        "versions": torch.int64,
        "rewards": torch.float32,
        "no_eos": torch.bool,
    }
    narrowed = trajectory_from_response(replace(response, output_kept=[[3, 9]]), 0.5)
    assert narrowed["kept_counts"].tolist() == [[0, 0, 2]] and narrowed["kept_ids"].tolist() == [[3, 9]]
    assert narrowed["kept_counts"].dtype == narrowed["kept_ids"].dtype == torch.int32
    assert trajectory["versions"].tolist() == [[-1, -1, 7]] and trajectory["no_eos"].tolist() == [True]


def test_a_turn_that_is_not_trained_is_context_and_keeps_what_it_earned() -> None:
    context = SampledTurn(FIRST, 0.25, is_trained=False)
    row = row_of_turns([context, SampledTurn(SECOND)], 0.5, has_turn_rewards=True)
    assert row["loss_mask"].tolist() == [[0, 0, 0, 0, 0, 0, 1]]
    assert row["logprobs"].tolist() == [[0, 0, 0, 0, 0, 0, -1]]
    assert row["versions"].tolist() == [[-1, -1, -1, -1, -1, -1, 6]]
    assert (row["kept_counts"].tolist(), row["kept_ids"].tolist()) == ([[0, 0, 0, 0, 0, 0, 1]], [[8]])
    assert row["turn_rewards"].tolist() == [[0, 0, 0, 0.25, 0, 0, 0]] and row["turn_rewards"].dtype == torch.float32
    judged = row_of_turns([SampledTurn(FIRST), SampledTurn(SECOND, is_trained=False)], 0.5)
    assert judged["no_eos"].tolist() == [False], "what was cut off is not trained on"
    nothing = replace(SECOND, output_tokens=[], output_logprobs=[], output_versions=[])
    with pytest.raises(TrajectoryError, match="must have sampled a token: got none in turn 2"):
        row_of_turns([SampledTurn(FIRST), SampledTurn(nothing, 1.0)], 0.5, has_turn_rewards=True)


def answer(ids: list[int], *tokens: int, logprob: float = -1.0) -> ModelResponse:
    return ModelResponse(ids, list(tokens), [logprob] * len(tokens), [2] * len(tokens), "stop", "")


def test_a_reward_after_a_branch_belongs_to_no_turn() -> None:
    builder = TrajectoryBuilder(FIRST.input_tokens)
    builder.add(FIRST)
    builder.branch()
    with pytest.raises(TrajectoryError, match=r"a reward must follow a turn of its row: got 1\.0 and none"):
        builder.earn(1.0)


def test_a_branch_shares_its_context_and_trains_on_no_token_twice() -> None:
    builder = TrajectoryBuilder([1, 2])
    builder.add(answer(builder.ids, 10, 11), reward=1.0)
    shared = builder.ids
    builder.extend([3])
    builder.add(answer(builder.ids, 12), reward=2.0)
    builder.branch(shared)  # as the second of two sub-agents
    builder.extend([4, 5])
    builder.add(answer(builder.ids, 13), reward=4.0)
    builder.branch([1, 6])  # as a compaction
    builder.add(answer(builder.ids, 14))
    run = builder.finish(sample_index=3)
    assert run["input_ids"].tolist() == [
        [1, 2, 10, 11, 3, 12, 0],
        [1, 2, 10, 11, 4, 5, 13],
        [1, 6, 14, 0, 0, 0, 0],
    ]
    assert run["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0, 0]]
    assert run["turn_rewards"].tolist() == [[0, 0, 0, 1, 0, 2 + 4, 0], [0, 0, 0, 1, 0, 0, 4 + 2], [0, 0, 7, 0, 0, 0, 0]]
    assert run["rewards"].tolist() == [7.0, 7.0, 7.0] and run["sample_index"].tolist() == [3, 3, 3]
    assert run["sample_index"].dtype == torch.int64
    assert "turn_rewards" not in trajectory_from_turns([FIRST], 1.0)


def test_what_is_not_an_answer_to_the_row_is_refused() -> None:
    builder = TrajectoryBuilder([1, 2])
    with pytest.raises(TrajectoryError, match=r"to the 2 tokens of builder.ids: got one to 3 tokens, .* up to token 1"):
        builder.add(answer([1, 3, 4], 5))
    with pytest.raises(TrajectoryError, match=r"must have a response and a reward: got 0 responses, reward 1\.0"):
        builder.finish(1.0)
    builder.add(answer([1, 2], 5))
    with pytest.raises(TrajectoryError, match="got 1 responses, reward None and 0 rewards of turns"):
        builder.finish()
    builder.ids.append(7)
    assert builder.ids == [1, 2, 5]


Step = tuple[str, list[int]]
tokens = st.lists(st.integers(0, 9), max_size=3)
steps = st.lists(st.tuples(st.sampled_from(["extend", "add", "branch", "back", "anew"]), tokens), max_size=12)


@given(steps)
def test_each_sampled_token_is_trained_on_in_exactly_one_row(steps: list[Step]) -> None:
    builder, marks = TrajectoryBuilder([0]), [[0]]
    logprobs = (-float(number) for number in itertools.count(1))  # each token's own
    sampled: dict[float, tuple[list[int], int]] = {}
    for act, ids in [*steps, ("add", [5])]:
        if act == "extend":
            builder.extend(ids)
        elif act == "add":
            context, values = builder.ids, [next(logprobs) for _ in ids]
            builder.add(ModelResponse(context, ids, values, [1] * len(ids), "stop", ""))
            sampled |= {value: (context + ids[:place], ids[place]) for place, value in enumerate(values)}
            marks.append(builder.ids)
        else:
            builder.branch({"branch": None, "back": marks[len(ids) % len(marks)], "anew": [7, *ids]}[act])
    run = check_trajectory(builder.finish(1.0), head_version=1)
    for row in run:
        for place in row["loss_mask"].nonzero().flatten().tolist():
            context, token = sampled.pop(row["logprobs"][place].item())
            assert row["input_ids"][: place + 1].tolist() == [*context, token]
    assert not sampled, "what was sampled is trained on"


async def test_a_failed_sample_cancels_the_others_of_its_group() -> None:
    cancelled = []

    async def run(sample: int) -> None:
        if sample == 1:
            raise OSError("lost")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(sample)
            raise

    with pytest.raises(OSError, match="lost"):
        await sample_group(run, 3)
    await asyncio.sleep(0)
    assert cancelled == [0, 2]


async def test_a_group_has_the_rows_of_its_samples_in_their_order() -> None:
    async def run(sample: int):
        await asyncio.sleep(0.01 * (2 - sample))
        builder = TrajectoryBuilder([sample])
        for _ in range(sample + 1):
            builder.add(answer(builder.ids, 5))
            builder.branch([9])
        return builder.finish(float(sample), sample_index=sample)

    group = await sample_group(run, 3)
    assert group["sample_index"].tolist() == [0, 1, 1, 2, 2, 2] == group["rewards"].long().tolist()

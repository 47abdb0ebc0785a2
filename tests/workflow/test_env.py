"""Environments in threads, in the loop and in processes; each failure is an EnvError, and the next run works."""

import asyncio
import os
import re
import threading
from typing import Any

import psutil
import pytest
from environments import AsyncCountdown, Countdown, Counter
from testing_conversations import SayingEngine, sampled_texts

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import EnvError
from arealite.api.io_struct import PromptId
from arealite.rollout.trajectory import check_trajectory
from arealite.workflow.env import EnvWorkflow

END = "<|im_end|>"


def says(text: str) -> str:
    """Count down by 3, but say nothing useful at first."""
    return "hm" if text.count("assistant\n") == 1 else "3"


def workflow_of(tokenizer, make_env: Any = Countdown, n_samples: int = 2, **options: Any) -> EnvWorkflow:
    return EnvWorkflow(Counter(), make_env, GenerationHyperparameters(n_samples=n_samples), tokenizer, **options)


async def run(tokenizer, workflow: EnvWorkflow, **data: Any) -> Any:
    return check_trajectory(await workflow.arun_episode(SayingEngine(tokenizer, says), data), head_version=0)


@pytest.mark.parametrize("make_env", [Countdown, AsyncCountdown])
async def test_observations_answers_and_rewards_by_hand(tokenizer, make_env: Any) -> None:
    log: list[str] = []
    group = await run(tokenizer, workflow_of(tokenizer, make_env, turn_rewards=True), seed=7, log=log)
    pid = os.getpid()
    for row in group:
        assert sampled_texts(tokenizer, row) == [f"hm{END}", f"3{END}", f"3{END}", f"3{END}"]
        text = tokenizer.decode(row["input_ids"][row["attention_mask"]])
        told = re.findall(r"user\n(.*?)<", text)
        assert told == [f"7 left in {pid}", "Say a number.", f"4 left in {pid}", f"1 left in {pid}"]
        places = row["turn_rewards"].nonzero().flatten().tolist()
        assert row["turn_rewards"][places].tolist() == [3, 3, 3]
        assert all(tokenizer.decode([row["input_ids"][place].item()]) == END for place in places)
    assert group["rewards"].tolist() == [9, 9] and group["sample_index"].tolist() == [0, 1]
    metrics = [group[name].tolist() for name in ("num_turns", "parse_errors", "is_terminated")]
    assert metrics == [[4, 4], [1, 1], [1, 1]] and log == ["closed", "closed"]


async def test_a_run_ends_where_the_environment_or_the_workflow_limits_it(tokenizer) -> None:
    truncated = await run(tokenizer, workflow_of(tokenizer), seed=9, limit=2)
    assert truncated["rewards"].tolist() == [6, 6] and truncated["is_terminated"].tolist() == [0, 0]
    assert "turn_rewards" not in truncated
    cut = await run(tokenizer, workflow_of(tokenizer, max_turns=2), seed=9)
    assert cut["num_turns"].tolist() == [2, 2] and cut["rewards"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="max_turns must be at least 1: got 0"):
        workflow_of(tokenizer, max_turns=0)


async def test_samples_of_a_prompt_begin_with_one_seed(tokenizer) -> None:
    seeds = []
    for prompt in (PromptId(0, 1), PromptId(0, 1), PromptId(1, 1)):
        group = await run(tokenizer, workflow_of(tokenizer, max_turns=1), prompt_id=prompt)
        seeds += [re.search(r"user\n(\d) left", tokenizer.decode(row["input_ids"]))[1] for row in group]
    assert len(set(seeds[:4])) == 1 and seeds[4] == seeds[5] != seeds[0]


async def test_environments_may_refuse_an_action_and_are_bounded(tokenizer) -> None:
    """A ParseError of a step is told to the model as one of the agent is."""
    open_now, most = 0, 0

    class Refusing(AsyncCountdown):
        async def areset(self, *, seed: int) -> Any:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            return await super().areset(seed=seed)

        async def astep(self, action: Any) -> Any:
            return await super().astep(Counter().act({"content": action}))

        async def aclose(self) -> None:
            nonlocal open_now
            open_now -= 1

    class Passing(Counter):
        def act(self, message: dict[str, Any]) -> Any:
            return message["content"]

    workflow = EnvWorkflow(Passing(), Refusing, GenerationHyperparameters(n_samples=5), tokenizer, max_envs=2)
    group = await run(tokenizer, workflow, seed=7)
    assert group["rewards"].tolist() == [9] * 5 and group["parse_errors"].tolist() == [1] * 5
    assert "Say a number." in tokenizer.decode(group[0]["input_ids"]) and (open_now, most) == (0, 2)


FAULTS = [
    ("raise", "step of the environment must not raise: got KeyError: 'left'"),
    ("reset", r"reset must return \(observation, info\): got 7"),
    ("tuple", r"step must return \(observation, reward, terminated, truncated, info\): got \(4, 1.0, True"),
    ("nan", "the reward of a step must be a finite number: got nan"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS)
async def test_a_fault_of_the_environment_is_its_error(tokenizer, fault: str, told: str) -> None:
    log: list[str] = []
    with pytest.raises(EnvError, match=told):
        await run(tokenizer, workflow_of(tokenizer, n_samples=1), seed=7, fault=fault, log=log)
    assert log == ["closed"]


@pytest.mark.parametrize("make_env", [Countdown, AsyncCountdown])
async def test_an_environment_that_is_made_past_its_deadline_is_closed(tokenizer, make_env: Any) -> None:
    may_be_made, closed = threading.Event(), threading.Event()

    class Log(list[str]):
        def append(self, text: str) -> None:
            closed.set()

    def make(data: dict[str, Any]) -> Countdown:
        assert may_be_made.wait(60)
        return make_env(data | {"log": Log()})

    with pytest.raises(EnvError, match=r"make_env of the environment must return within step_timeout = 0.1 s"):
        await run(tokenizer, workflow_of(tokenizer, make, n_samples=1, step_timeout=0.1), seed=7)
    assert not closed.is_set()
    may_be_made.set()
    assert await asyncio.to_thread(closed.wait, 60)


async def test_an_environment_in_a_process_may_crash_hang_and_raise(tokenizer) -> None:
    """Afterwards the workflow runs on, with processes that were not hurt, and leaves none behind."""
    before = set(psutil.Process().children(recursive=True))
    workflow = workflow_of(tokenizer, n_samples=1, isolated=True, step_timeout=60)
    group = await run(tokenizer, workflow, seed=7)
    (pid,) = set(re.findall(r"left in (\d+)", tokenizer.decode(group[0]["input_ids"])))
    assert int(pid) != os.getpid() and group["rewards"].tolist() == [9]
    with pytest.raises(EnvError, match=r"live until step returns: got exit status 137 \(SIGKILL\)"):
        await run(tokenizer, workflow, seed=7, fault="crash")
    assert not psutil.pid_exists(int(pid)), "the idle process was used, and crashed"
    group = await run(tokenizer, workflow, seed=7)
    (second,) = set(re.findall(r"left in (\d+)", tokenizer.decode(group[0]["input_ids"])))
    workflow.step_timeout = 3.0
    with pytest.raises(EnvError, match=r"step of the environment must return within step_timeout = 3 s"):
        await run(tokenizer, workflow, seed=7, fault="hang")
    assert not psutil.pid_exists(int(second)), "what hung was killed"
    workflow.step_timeout = 60
    with pytest.raises(
        EnvError, match=r"step of the environment must not raise: got KeyError: 'left' \(.*environments"
    ):
        await run(tokenizer, workflow, seed=7, fault="raise")
    workflow.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert [one for one in left if "resource_tracker" not in " ".join(one.cmdline())] == []
    with pytest.raises(EnvError, match=r"must be open: got a call after close\(\)"):
        await run(tokenizer, workflow, seed=7)

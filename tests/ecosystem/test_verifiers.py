"""Environments of verifiers 0.4, in an interpreter of their own, against a scripted model behind our proxy."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from testing_proxy import ScriptedModel, chatml_tokenizer, tool_call, until
from testing_quickstart import write_tiny_model

from arealite.agent.verifiers import VerifiersAgent, VerifiersWorkflow
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.errors import AgentError
from arealite.dataset import get_custom_dataset

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("VERIFIERS_PYTHON", str(Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"))
FOLDER = Path(__file__).parent / "environments"


def path_of(name: str, **options: Any) -> str:
    words = "".join(f"&{key}={value}" for key, value in options.items())
    return f"verifiers:{FOLDER}/{name}.py?python={PYTHON}{words}"


class Trained:
    """A workflow, with what its model sampled."""

    def __init__(self, folder: Path, answers: Callable[[str], str], n_samples: int, **config: Any) -> None:
        tokenizer = chatml_tokenizer(folder)
        self.model = ScriptedModel(answers, tokenizer)
        gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=200)
        self.workflow = VerifiersWorkflow(gconfig, tokenizer, config=AgentConfig(**config))

    async def run(self, row: dict[str, Any]) -> Any:
        async with asyncio.timeout(280):
            return await self.workflow.arun_episode(self.model, row)  # type: ignore[arg-type]


Make = Callable[..., Trained]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Trained] = []

    def one(answers: Callable[[str], str], n_samples: int = 1, **config: Any) -> Trained:
        made.append(Trained(tmp_path, answers, n_samples, **config))
        return made[-1]

    yield one
    for trained in made:
        await asyncio.to_thread(trained.workflow.close)
    await until(lambda: not psutil.Process().children(recursive=True))


async def waiting(make: Make) -> tuple[Trained, asyncio.Future[Any]]:
    """Return a workflow, and an episode of it whose request waits for its answer."""
    trained = make(lambda prompt: "It is 1.")
    trained.model.may_answer = asyncio.Event()
    episode = asyncio.ensure_future(trained.run({"environment": path_of("sums"), "task": 0}))
    await until(lambda: trained.model.num_running)
    return trained, episode


async def answered(trained: Trained) -> None:
    """Let the model answer; the next episode must have its own turn alone."""
    assert trained.model.may_answer is not None
    trained.model.may_answer.set()
    batch = await trained.run({"environment": path_of("sums"), "task": 0})
    assert (batch["rewards"].tolist(), batch["agent/turns"].tolist()) == ([2.0], [1.0])


def test_tasks_are_rows_in_their_order() -> None:
    rows = get_custom_dataset(path_of("sums", **{"taskset.size": 3}), type="rl")
    assert [row["messages"] for row in rows] == [[{"role": "user", "content": f"What is {n} + 1?"}] for n in range(3)]
    assert [(row["task"], row["environment"]) for row in rows] == [(n, rows[0]["environment"]) for n in range(3)]


def test_environments_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be an environment of verifiers.*got .*'nosuch' not found"):
        get_custom_dataset(f"verifiers:nosuch?python={PYTHON}", type="rl")
    with pytest.raises(ValueError, match="No such file"):
        get_custom_dataset("verifiers:nosuch?python=/nowhere/python", type="rl")


async def test_one_turn_is_trained_with_the_ids_and_the_reward_of_the_environment(make: Make) -> None:
    texts = iter(["It is 3.", "It is 3!", "No!"])
    trained = make(lambda prompt: next(texts), n_samples=3)
    batch = await trained.run({"environment": path_of("sums"), "task": 2})
    assert sorted(batch["rewards"].tolist()) == [-0.5, 1.5, 2.0]
    sampled = sorted(one.input_tokens + one.output_tokens for one in trained.model.responses)
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    assert sorted(ids[mask].tolist() for ids, mask in rows) == sampled, "ids are those that were sampled"


async def test_tools_with_a_state_of_their_own_in_each_run(make: Make) -> None:
    def answer(prompt: str) -> str:
        target = int(re.findall(r"show (\d+) in steps", prompt)[0])
        shown = [0, *map(int, re.findall(r"counter shows (\d+)", prompt))][-1]
        return "Done." if shown == target else tool_call("counter_add", '{"number": 2}')

    trained = make(answer, n_samples=2)
    four, six = await asyncio.gather(*(trained.run({"environment": path_of("counter"), "task": n}) for n in (1, 2)))
    assert four["rewards"].tolist() == six["rewards"].tolist() == [1.0, 1.0]
    assert (four["agent/turns"].tolist(), six["agent/turns"].tolist()) == ([3.0, 3.0], [4.0, 4.0])


async def test_64_episodes_at_once_keep_their_rewards_apart(make: Make) -> None:
    def answer(prompt: str) -> str:
        return f"It is {int(prompt.rpartition(' is ')[2].partition(' ')[0]) + 1}."

    trained = make(answer, n_samples=8)
    path = path_of("sums", **{"taskset.size": 8})
    batches = await asyncio.gather(*(trained.run({"environment": path, "task": n}) for n in range(8)))
    assert [batch["rewards"].tolist() for batch in batches] == [[2.0] * 8] * 8
    assert len(trained.model.responses) == 64


async def test_a_dead_process_fails_its_episodes_and_the_next_one_starts_anew(make: Make) -> None:
    trained, lost = await waiting(make)
    agent = trained.workflow._agent
    assert isinstance(agent, VerifiersAgent)
    (environment,) = agent._environments.values()
    assert environment._process is not None
    environment._process.kill()
    with pytest.raises(AgentError, match=r"the process of verifiers:.* must live: got .*SIGKILL"):
        await lost
    await answered(trained)


async def test_a_cancelled_episode_leaves_nothing_in_the_environment(make: Make) -> None:
    trained, left = await waiting(make)
    left.cancel()
    await until(lambda: trained.model.num_cancelled)
    await answered(trained)


async def test_limits_of_a_run_end_it_as_those_of_any_agent(make: Make) -> None:
    trained = make(lambda prompt: tool_call("counter_add", '{"number": 0}'), max_turns=2)
    batch = await trained.run({"environment": path_of("counter"), "task": 0})
    assert batch["rewards"].tolist() == [0.0] and batch["agent/limited"].tolist() == [1.0]


def test_the_command_trains_an_environment(tmp_path: Path) -> None:
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    keys = ["train_dataset.batch_size=4", "gconfig.n_samples=2", "gconfig.max_new_tokens=16", "total_train_steps=2"]
    keys += ["valid_dataset.max_rows=1", f"cluster.fileroot={tmp_path}", "experiment_name=e"]
    words = ["train", "--model", str(tmp_path / "model"), "--env", path_of("sums").removeprefix("verifiers:"), *keys]
    command = [sys.executable, "-m", "arealite.cli.main", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1/2" in done.stdout and "WARNING asyncio" not in done.stdout + done.stderr
    trained = database_rows(tmp_path / "e" / "trial0" / "ledger.sqlite")
    assert trained == 8, "two steps of four prompts"


def database_rows(ledger: Path) -> int:
    with sqlite3.connect(ledger) as database:
        (number,) = database.execute("SELECT count(*) FROM prompts WHERE state = 'trained'").fetchone()
    return int(number)

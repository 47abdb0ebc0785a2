"""Agents as workflows: what they may be, what they may return, and what becomes of them."""

import asyncio
import os
import sys
from pathlib import Path

import openai
import process_agents
import pytest
from testing_proxy import ScriptedModel, tool_call, until

from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.errors import AgentError, ConfigError, ServerError
from arealite.api.io_struct import PromptId
from arealite.rollout.trajectory import check_trajectory
from arealite.utils.processes import is_alive, wait_gone

pytestmark = pytest.mark.xdist_group("agent_packages")
ROW = {"question": "Hi", "prompt_id": PromptId(0, 1)}


@pytest.fixture
def model(tokenizer):
    return ScriptedModel(lambda prompt: "Hello!", tokenizer)


@pytest.fixture
def workflow_of(tokenizer):
    """Make workflows that are closed in the end."""
    made = []

    def make(run, *, n=1, config=None, **options):
        gconfig = GenerationHyperparameters(n_samples=n, max_new_tokens=200)
        made.append(AgentWorkflow(run, gconfig, tokenizer, config=config, **options))
        return made[-1]

    yield make
    for workflow in made:
        workflow.close()


def client_of(base_url, api_key, http_client=None):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)


async def say(client, *contents, **options):
    """Ask with these contents of user and assistant in turn, and return the completion."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return await client.chat.completions.create(model="m", messages=messages, **options)


def sampled(row, model):
    """Return the ids that a row trains on."""
    return row["input_ids"][row["loss_mask"] == 1].tolist()


async def test_a_group_of_runs(model, workflow_of) -> None:
    numbers = iter([1.0, 0.0, 0.5])

    async def agent(data, base_url, api_key, http_client):
        assert data["question"] == "Hi"
        client = client_of(base_url, api_key, http_client)
        first = (await say(client, "Hi")).choices[0].message.content
        await say(client, "Hi", first, "Again")
        return next(numbers)

    batch = await workflow_of(agent, n=3).arun_episode(model, ROW)
    check_trajectory(batch, 3)
    assert batch["sample_index"].tolist() == [0, 1, 2] and sorted(batch["rewards"].tolist()) == [0.0, 0.5, 1.0]
    hello = model.responses[0].output_tokens
    for row in batch:
        assert sampled(row, model) == hello * 2
        assert row["logprobs"][row["loss_mask"] == 1].tolist() == pytest.approx(model.responses[0].output_logprobs * 2)
    assert batch["agent/turns"].tolist() == [2.0] * 3 and batch["agent/rows"].tolist() == [1.0] * len(batch)


async def test_sub_agents_and_compaction_are_rows_of_one_run(model, workflow_of) -> None:
    async def agent(data, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            await asyncio.gather(*(say(client, f"Part {name}") for name in "abc"))
            await say(client, "Hi")
            await say(client, "Hi", "Hello!", "Again")
            await say(client, "Summary of all that", "Hello!", "Go on")  # nobody has sampled this answer
            return 1.0

    batch = await workflow_of(agent).arun_episode(model, ROW)
    check_trajectory(batch, 3)
    assert batch["sample_index"].tolist() == [0] * 5 and batch["rewards"].tolist() == [1.0] * 5
    num_sampled = sum(one.output_len for one in model.responses)
    assert int(batch["loss_mask"].sum()) == num_sampled, "each sampled token is trained on in exactly one row"


async def test_rewards_of_turns(model, workflow_of) -> None:
    async def agent(data, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            first = await say(client, "Hi")
            second = await say(client, "Hi", "Hello!", "Again")
            return {first.id: 0.25, second.id: 1.0}

    batch = await workflow_of(agent).arun_episode(model, ROW)
    assert batch["rewards"].tolist() == [1.25]
    rewards = batch["turn_rewards"][0]
    assert rewards[rewards != 0].tolist() == [0.25, 1.0]
    ends = batch["input_ids"][0][rewards != 0].tolist()
    assert ends == [model.tokenizer.eos_token_id] * 2


@pytest.mark.parametrize(
    "reward",
    ["good", float("nan"), pytest.param(10**400, id="too large"), {"chatcmpl-other": 1.0}, {"x": "y"}, object()],
)
async def test_what_is_no_reward_fails_the_episode(model, workflow_of, reward) -> None:
    async def agent(data, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            await say(client, "Hi")
        return reward

    with pytest.raises(AgentError, match=r"must return a finite number|must be for responses of the run"):
        await workflow_of(agent).arun_episode(model, ROW)


async def test_an_agent_that_exits_fails_its_own_episode_only(model, workflow_of) -> None:
    async def agent(data, base_url, api_key):
        if data["question"] == "Exit":
            sys.exit(2)
        async with client_of(base_url, api_key) as client:
            await say(client, "Hi")
        return 1.0

    workflow = workflow_of(agent)
    with pytest.raises(AgentError, match=r"got sys.exit\(2\)"):
        await workflow.arun_episode(model, ROW | {"question": "Exit"})
    assert (await workflow.arun_episode(model, ROW))["rewards"].tolist() == [1.0]


async def test_the_error_of_an_agent_is_the_episodes(model, workflow_of) -> None:
    async def agent(data, base_url, api_key):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await workflow_of(agent, n=2).arun_episode(model, ROW)


async def test_the_error_of_the_engine_is_the_episodes_whatever_the_agent_does(model, workflow_of) -> None:
    async def agent(data, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            try:
                await say(client, "Hi")
            except openai.APIError:
                await asyncio.sleep(1000)

    model.errors = [ServerError("no server is left")]
    with pytest.raises(ServerError, match="no server is left"):
        await workflow_of(agent).arun_episode(model, ROW)


@pytest.mark.parametrize("on_limit", ["train", "reject"])
async def test_a_run_that_a_limit_ends(model, workflow_of, on_limit) -> None:
    async def agent(data, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            for _ in range(3):
                await say(client, "Hi")
        return 1.0

    config = AgentConfig(max_turns=2, on_limit=on_limit)
    batch = await workflow_of(agent, config=config).arun_episode(model, ROW)
    if on_limit == "reject":
        assert batch is None
    else:
        assert batch["rewards"].tolist() == [0.0] * 2 and batch["agent/limited"].tolist() == [1.0] * 2


async def test_a_run_that_a_limit_ends_beside_rewards_of_turns(model, workflow_of) -> None:
    is_long = iter([True, False])

    async def agent(data, base_url, api_key):
        num_turns = 3 if next(is_long) else 1
        async with client_of(base_url, api_key) as client:
            return {(await say(client, "Hi")).id: 1.0 for _ in range(num_turns)}

    batch = await workflow_of(agent, n=2, config=AgentConfig(max_turns=2)).arun_episode(model, ROW)
    assert sorted(batch["turn_rewards"].sum(1).tolist()) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("which, trained", [("all", 3), ("first", 1), ("longest", 1)])
async def test_which_conversations_are_trained_on(tokenizer, workflow_of, which, trained) -> None:
    model = ScriptedModel(lambda prompt: "A long answer." if "Hi" in prompt else "No", tokenizer)

    async def agent(data, base_url, api_key):
        async with client_of(base_url, api_key) as client:
            for text in ("Title?", "Hi", "Summary?"):
                await say(client, text)
        return 1.0

    batch = await workflow_of(agent, config=AgentConfig(train_roots=which)).arun_episode(model, ROW)
    assert len(batch) == trained
    if trained == 1:
        answer = {"first": 0, "longest": 1}[which]
        assert sampled(batch[0], model) == model.responses[answer].output_tokens


@pytest.mark.parametrize("which", ["first", "longest"])
async def test_a_conversation_that_is_not_trained_on_is_never_the_chosen_one(tokenizer, workflow_of, which) -> None:
    model = ScriptedModel(lambda prompt: "A long question." if "User" in prompt else "No", tokenizer)

    async def agent(data, base_url, api_key, untrained_key):
        async with client_of(base_url, api_key) as client:
            asked = await say(client.with_options(api_key=untrained_key), "User, begin!")
            await say(client, asked.choices[0].message.content)
        return 1.0

    batch = await workflow_of(agent, config=AgentConfig(train_roots=which)).arun_episode(model, ROW)
    assert len(batch) == 1 and sampled(batch[0], model) == model.responses[1].output_tokens


async def test_a_cancelled_episode_ends_its_agents(model, workflow_of) -> None:
    ended = []

    async def agent(data, base_url, api_key):
        try:
            async with client_of(base_url, api_key) as client:
                await say(client, "Hi")
        finally:
            ended.append(data["question"])

    model.may_answer = asyncio.Event()
    episode = asyncio.create_task(workflow_of(agent, n=2).arun_episode(model, ROW))
    await until(lambda: model.num_running == 2)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    await until(lambda: len(ended) == model.num_cancelled == 2)


async def test_openai_agents_on_responses(tokenizer, workflow_of) -> None:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def weather(city: str) -> str:
        """Look up the weather."""
        return f"{city} is rainy"

    async def agent(data, base_url, api_key, http_client):
        responses = OpenAIResponsesModel("m", client_of(base_url, api_key, http_client))
        forecaster = Agent(name="Forecaster", instructions="Be brief.", model=responses, tools=[weather])
        result = Runner.run_streamed(forecaster, data["question"])
        async for _ in result.stream_events():
            pass
        return float(result.final_output == "Take an umbrella.")

    def answer(prompt):
        return "Take an umbrella." if "rainy" in prompt else tool_call("weather", '{"city":"Oslo"}')

    model = ScriptedModel(answer, tokenizer)
    batch = await workflow_of(agent).arun_episode(model, ROW)
    assert batch["rewards"].tolist() == [1.0] and batch["agent/rows"].tolist() == [1.0] * len(batch)
    assert sampled(batch[0], model) == [id for one in model.responses for id in one.output_tokens]


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_an_agent_in_a_process(model, workflow_of, kind) -> None:
    command = [sys.executable, str(Path(__file__).with_name("process_agents.py"))]
    workflow = workflow_of(process_agents.polite if kind == "function" else command, n=2, num_processes=1)
    for _ in range(2):
        batch = await workflow.arun_episode(model, ROW)
        assert batch["rewards"].tolist() == [1.0, 1.0]
    assert len(model.responses) == 4


async def test_a_process_finds_the_model_by_its_environment_and_rewards_turns(model, workflow_of) -> None:
    batch = await workflow_of(process_agents.by_environment).arun_episode(model, ROW)
    assert batch["rewards"].tolist() == [3.0] * 2
    assert sorted(batch["turn_rewards"].sum(1).tolist()) == [1.0, 2.0]


async def test_a_shell_command_that_fails_or_prints_no_reward(model, workflow_of) -> None:
    with pytest.raises(AgentError, match=r"exit status 7.*\n.*something is wrong"):
        await workflow_of("echo something is wrong >&2; exit 7").arun_episode(model, ROW)
    with pytest.raises(AgentError, match="must print its reward as its last line: got 'done'"):
        await workflow_of("echo done").arun_episode(model, ROW)
    assert await workflow_of("cat > /dev/null; echo null").arun_episode(model, ROW) is None


async def test_what_a_command_leaves_behind_ends_with_it(model, workflow_of, tmp_path) -> None:
    """Though it holds the output, and whether it is in the command's process group or not."""
    shell = f"{{}} sleep 1000 & echo $! > {tmp_path}/pid; cat > /dev/null; echo null"
    assert await workflow_of(shell.format("")).arun_episode(model, ROW) is None
    assert not await asyncio.to_thread(wait_gone, [int((tmp_path / "pid").read_text())], 30)


async def test_a_process_that_holds_the_output_of_its_command_is_told(
    model, workflow_of, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("arealite.agent.launch._CLOSE_S", 0.2)
    shell = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000' & until test -s {tmp_path}/pid; do :; done"
    with pytest.raises(AgentError, match="must leave no process that has its output"):
        await workflow_of(f"{shell}; echo null").arun_episode(model, ROW)
    os.kill(int((tmp_path / "pid").read_text()), 9)


async def test_a_function_that_raises_or_dies(model, workflow_of) -> None:
    with pytest.raises(AgentError, match="agent failing must not raise: got ZeroDivisionError: no luck"):
        await workflow_of(process_agents.failing).arun_episode(model, ROW)
    with pytest.raises(AgentError, match=r"an agent must return a finite number.*: got nan"):
        await workflow_of(process_agents.without_a_number).arun_episode(model, ROW)
    with pytest.raises(AgentError, match="agent dying must run in a healthy process: got exit status 3"):
        await workflow_of(process_agents.dying).arun_episode(model, ROW)


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_processes_of_a_cancelled_episode_are_killed(model, workflow_of, tmp_path, kind) -> None:
    row = ROW | {"pids": str(tmp_path / "pids")}
    shell = f"sleep 1000 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; sleep 1000"
    workflow = workflow_of(process_agents.hanging if kind == "function" else shell)
    episode = asyncio.create_task(workflow.arun_episode(model, row))
    await until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(is_alive, pids)) and os.getpid() not in pids
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert not any(map(is_alive, pids)), "the episode ends after them"


def test_agents_that_can_not_run(workflow_of) -> None:
    async def needy(data, base_url, model_name):
        return 0.0

    async def needy_of_others(model_name, **others):
        return 0.0

    for agent in (needy, needy_of_others):
        with pytest.raises(ConfigError, match=r"must take arguments of .*: got model_name"):
            workflow_of(agent)
    with pytest.raises(ValueError, match="an agent must be importable"):
        workflow_of(lambda data: 1.0)

"""Tools that work, crash, hang and lie; and that generation never waits for one."""

import asyncio
import threading
from typing import Any

import pytest
from rewards import has_seven
from testing_chat_templates import real_tokenizer
from testing_conversations import SayingEngine, call, sampled_texts

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.env_api import Environment
from arealite.api.errors import ConfigError, EnvError
from arealite.rollout.episode import kind_of
from arealite.rollout.trajectory import check_trajectory
from arealite.workflow.tools import ToolWorkflow

DATA = {"messages": [{"role": "user", "content": "How much is 3 + 4?"}]}
END = "<|im_end|>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def look_up(word: str) -> dict[str, Any]:
    """Look a word up.

    Args:
        word: What to look up.
    """
    if word == "nothing":
        raise ValueError("there is no such word")
    return {"word": word, "means": "ü"}


def workflow_of(tokenizer, *tools: Any, **options: Any) -> ToolWorkflow:
    return ToolWorkflow(has_seven, GenerationHyperparameters(), tokenizer, tools, **options)


async def run(tokenizer, says: Any, *tools: Any, **options: Any) -> tuple[dict[str, Any], str]:
    """Return metrics and text of a run."""
    workflow, engine = workflow_of(tokenizer, *tools, **options), SayingEngine(tokenizer, says)
    try:
        row = check_trajectory(await workflow.arun_episode(engine, DATA), head_version=0)
    finally:
        workflow.close()
    metrics = {key: value.item() for key, value in row.items() if value.dim() == 1}
    return metrics, tokenizer.decode(row[0]["input_ids"])


async def test_calls_of_one_answer_run_at_once_and_their_results_follow_in_order(tokenizer) -> None:
    both = threading.Barrier(2, timeout=60)

    def slow(a: int) -> int:
        """Wait for the other call.

        Args:
            a: A number.
        """
        both.wait()
        return a + 1

    calls = "I call two. " + call("slow", a=1) + "\n" + call("slow", a=5)
    metrics, text = await run(tokenizer, lambda text: calls if "tool_response" not in text else "It is 7.", slow)
    assert (metrics["rewards"], metrics["num_turns"], metrics["tool_calls"]) == (1.0, 2, 2)
    results = "".join(f"<tool_response>\n{number}\n</tool_response>\n" for number in (2, 6))
    assert text.endswith(
        f"{calls}{END}\n<|im_start|>user\n{results.rstrip()}{END}\n<|im_start|>assistant\nIt is 7.{END}"
    )
    assert '"name": "slow"' in text and "A number." in text, "the model is told its tools"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("subtract", a=1), "Error: 'subtract' is not a tool. There are: add, look_up."),
        (call("add", a=1), "Error: add: missing a required argument: 'b'."),
        (call("look_up", word="nothing"), "Error: there is no such word"),
    ],
)
async def test_the_models_own_mistakes_are_told_to_it(tokenizer, said: str, told: str) -> None:
    metrics, text = await run(tokenizer, lambda text: said if "tool_response" not in text else "7", add, look_up)
    assert f"<tool_response>\n{told}\n</tool_response>" in text
    assert (metrics["refused_calls"], metrics["rewards"]) == (1, 1)


async def test_results_that_are_no_text_are_json(tokenizer) -> None:
    said = call("look_up", word="rot")
    _, text = await run(tokenizer, lambda text: said if "tool_response" not in text else "7", look_up)
    assert '<tool_response>\n{"word": "rot", "means": "ü"}\n</tool_response>' in text


@pytest.mark.parametrize("raises", [False, True])
async def test_half_a_character_of_a_tool_becomes_one(tokenizer, raises: bool) -> None:
    def read(a: int) -> str:
        """Read.

        Args:
            a: A number.
        """
        if raises:
            raise ValueError("a\ud800b\U0001f642")
        return "a\ud800b\U0001f642"

    metrics, text = await run(tokenizer, lambda text: "7" if "tool_response" in text else call("read", a=1), read)
    assert f"<tool_response>\n{'Error: ' * raises}a\ufffdb\U0001f642\n" in text and metrics["rewards"] == 1


async def test_a_malformed_call_stays_text_and_is_the_answer(tokenizer) -> None:
    metrics, text = await run(tokenizer, lambda _: '<tool_call>\n{"name": "add", "argu', add)
    assert (metrics["malformed_calls"], metrics["num_turns"], metrics["tool_calls"]) == (1, 1, 0)
    assert text.endswith('{"name": "add", "argu' + END)


async def test_turns_end_at_their_limit(tokenizer) -> None:
    metrics, _ = await run(tokenizer, lambda _: call("add", a=1, b=2), add, max_turns=3)
    assert (metrics["num_turns"], metrics["tool_calls"]) == (3, 2)
    with pytest.raises(ValueError, match="max_turns must be at least 1: got 0"):
        await run(tokenizer, lambda _: call("add", a=1, b=2), add, max_turns=0)


def crash(a: int) -> int:
    """Crash.

    Args:
        a: A number.
    """
    raise ZeroDivisionError("oops")


async def hang(a: int) -> int:
    """Hang.

    Args:
        a: A number.
    """
    await asyncio.Event().wait()
    return a


def hang_in_thread(a: int) -> int:
    """Hang.

    Args:
        a: A number.
    """
    threading.Event().wait(60)
    return a


def lie(a: int) -> int:
    """Return what JSON can't hold.

    Args:
        a: A number.
    """
    return object()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (crash, "tool crash must raise nothing but ValueError: got ZeroDivisionError: oops"),
        (hang, "tool hang must return within tool_timeout = 0.1 s: it did not"),
        (hang_in_thread, "tool hang_in_thread must return within tool_timeout"),
        (lie, "tool lie must return what JSON can hold: got Object of type object"),
    ],
)
async def test_a_tool_that_fails_fails_the_episode_as_environment(tokenizer, tool: Any, told: str) -> None:
    timeout_s = 0.1 if "timeout" in told else 60.0
    with pytest.raises(ExceptionGroup) as failed:
        await run(tokenizer, lambda _: call(tool.__name__, a=1), tool, tool_timeout=timeout_s)
    assert kind_of(failed.value) == "environment" and failed.group_contains(EnvError, match=told)


async def test_generation_never_waits_for_a_tool(tokenizer) -> None:
    """The tool of the first run returns when all other runs have ended, whose model is asked meanwhile."""
    others_have_ended = threading.Event()

    def block(a: int) -> str:
        """Wait.

        Args:
            a: A number.
        """
        return str(others_have_ended.wait(60))

    def says(text: str) -> str:
        return call("block", a=1) if "first" in text and "tool_response" not in text else "7"

    workflow, engine = workflow_of(tokenizer, block), SayingEngine(tokenizer, says)
    first = asyncio.create_task(
        workflow.arun_episode(engine, {"messages": [{"role": "user", "content": "first"}]}),
    )
    await asyncio.gather(*(workflow.arun_episode(engine, DATA) for _ in range(20)))
    assert not first.done()
    others_have_ended.set()
    row = await first
    workflow.close()
    assert sampled_texts(tokenizer, row[0])[-1] == "7" + END
    assert "True" in tokenizer.decode(row[0]["input_ids"])


async def test_an_environment_of_its_own_for_each_run(tokenizer) -> None:
    made: list[Any] = []

    class Counting(Environment):
        def __init__(self, data: dict[str, Any]) -> None:
            self.calls, self.steps = 0, data["steps"]
            made.append(self)

        def list_tools(self) -> list[dict[str, Any]]:
            return [{"type": "function", "function": {"name": "count", "description": "", "parameters": {}}}]

        async def ainitialize(self) -> None:
            self.calls = 10

        async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> Any:
            self.calls += self.steps
            return self.calls

        async def aclose(self) -> None:
            self.calls = -1

    engine = SayingEngine(tokenizer, lambda text: "7" if "<tool_response>\n14" in text else call("count"))
    workflow = ToolWorkflow(has_seven, GenerationHyperparameters(n_samples=3), tokenizer, Counting)
    group = await workflow.arun_episode(engine, {**DATA, "steps": 2})
    workflow.close()
    assert group["num_turns"].tolist() == [3, 3, 3] and [one.calls for one in made] == [-1, -1, -1]


@pytest.mark.parametrize("fails_by", ["a crash", "a hang"])
async def test_an_environment_that_does_not_close_fails_as_environment(tokenizer, fails_by: str) -> None:
    class Stuck(Environment):
        async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> Any:
            return None

        async def aclose(self) -> None:
            if fails_by == "a crash":
                raise ZeroDivisionError("oops")
            await asyncio.Event().wait()

    workflow = ToolWorkflow(has_seven, GenerationHyperparameters(), tokenizer, lambda _: Stuck(), tool_timeout=0.1)
    told = {"a crash": "aclose must raise nothing but ValueError: got Zero", "a hang": "aclose must return within"}
    try:
        async with asyncio.timeout(30):
            with pytest.raises(EnvError, match=told[fails_by]):
                await workflow.arun_episode(SayingEngine(tokenizer, lambda _: "7"), DATA)
    finally:
        workflow.close()


def test_a_template_without_calls_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must have a chat template that writes calls of tools in a known format"):
        workflow_of(real_tokenizer("Phi-3"), add)
    with pytest.raises(ConfigError, match=r"tools must have names of their own: got \['add', 'add'\]"):
        workflow_of(real_tokenizer("Qwen2.5"), add, add)

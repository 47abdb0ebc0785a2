"""The agents that are trained, each as its package would be used without us. All want the room to be blue.

Beside that they do what agents do: give up on answers and ask again, abandon requests, ask sub-agents at once, go on
from a summary of the conversation.
"""

import asyncio
import contextlib
import json
import logging
from typing import Any

import anthropic
import openai
from agents import Agent, AgentsException, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

from trained_agents.painter import COLOURS, NAME_ONE, painted, summary, task

WANTED = "blue"
FIRST_PATIENCE_S = 0.02
set_tracing_disabled(True)
logging.getLogger("openai.agents").setLevel(logging.CRITICAL)  # it logs what it raises
_PARAMETERS = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
_PAINT = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": _PARAMETERS}}


async def on_openai(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    """Stream chat completions, impatiently."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)

    async def ask(messages: list[Any]) -> Any:
        async with client.chat.completions.stream(model="m", messages=messages, tools=[_PAINT]) as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_completion()).choices[0].message

    async def insist(messages: list[Any]) -> Any:
        patience_s = FIRST_PATIENCE_S
        while True:
            try:
                return await asyncio.wait_for(ask(messages), patience_s)
            except TimeoutError:
                patience_s *= 4

    messages: list[Any] = [{"role": "user", "content": task(data["room"])}]
    try:
        answer = await insist(messages)
    except openai.LengthFinishReasonError:
        return 0.0
    calls = answer.tool_calls or []
    if data["room"] % 8 == 0:
        nobody_waits = asyncio.create_task(ask([{"role": "user", "content": f"{NAME_ONE} {task(data['room'])}"}]))
        await asyncio.sleep(FIRST_PATIENCE_S)
        nobody_waits.cancel()
    if len(calls) != 1:
        return 0.0
    colour = str(json.loads(calls[0].function.arguments).get("colour"))
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": painted(colour)}
    with contextlib.suppress(openai.LengthFinishReasonError):
        await insist([*messages, answer.model_dump(exclude_none=True), result])
    return float(colour == WANTED)


async def on_anthropic(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    """Let the package run the tool and keep the conversation at the server; ask two sub-agents at once."""
    client = anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=http_client)
    colours: list[str] = []

    @anthropic.beta_async_tool(name="paint", description="Paint it.", input_schema=_PARAMETERS)  # type: ignore[arg-type]
    async def paint(colour: str) -> str:
        colours.append(colour)
        return painted(colour)

    async def name_one() -> None:
        await client.messages.create(model="m", max_tokens=20, messages=[{"role": "user", "content": NAME_ONE}])

    question: Any = [{"role": "user", "content": task(data["room"])}]
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=60, tools=[paint], messages=question, max_iterations=2
    )
    await asyncio.gather(runner.until_done(), name_one(), name_one())
    return float(colours == [WANTED])


async def on_openai_agents(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    """Run an agent on /v1/responses, then go on from a summary."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    colours: list[str] = []

    @function_tool
    def paint(colour: str) -> str:
        """Paint it."""
        colours.append(colour)
        return painted(colour)

    model = OpenAIResponsesModel("m", client)
    painter = Agent(name="Painter", model=model, tools=[paint])
    with contextlib.suppress(AgentsException):  # calls that it does not know or can't read, or too many
        await Runner.run(painter, task(data["room"]), max_turns=3)
    so_far = colours[0] if colours and colours[0] in COLOURS else "grey"
    with contextlib.suppress(AgentsException):  # an answer that was cut off
        shortened: Any = [{"role": "user", "content": text} for text in (task(data["room"]), summary(so_far))]
        await Runner.run(Agent(name="Summary", model=model, tools=[paint]), shortened, max_turns=1)
    return float(colours == [WANTED])

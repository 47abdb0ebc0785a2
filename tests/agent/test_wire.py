"""What the packages of OpenAI and Anthropic make of the proxy's answers, streamed and not."""

import copy
import json

import anthropic
import httpx2
import openai
import pytest
from testing_proxy import ScriptedModel, ids_equal, proxied, tool_call

pytestmark = pytest.mark.xdist_group("agent_packages")

WEATHER = {
    "name": "weather",
    "description": "Look up the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED = {"messages": [{"role": "user", "content": "a"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = tool_call("weather", '{"city":"Oslo"}')


def weather_agent(prompt: str) -> str:
    """Ask for the weather once, then answer."""
    if "rainy" in prompt:
        return "Take an umbrella."
    return f"Let me look.{CALL}" if "Tools:" in prompt else "Hello!"


@pytest.fixture
def model(tokenizer):
    return ScriptedModel(weather_agent, tokenizer)


def openai_client(proxy, session, **options):
    return openai.AsyncOpenAI(base_url=f"{proxy.address}/v1", api_key=session.key, **options)


def anthropic_client(proxy, session, **options):
    return anthropic.AsyncAnthropic(base_url=proxy.address, api_key=session.key, **options)


async def chat_once(client, messages, *, is_streamed, **options):
    """Return the message of an answer, put together by the package if it comes in pieces."""
    if not is_streamed:
        return (await client.chat.completions.create(model="m", messages=messages, **options)).choices[0]
    async with client.chat.completions.stream(model="m", messages=messages, **options) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_chat_with_a_tool(model, is_streamed) -> None:
    async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
        messages = [{"role": "user", "content": "Oslo?"}]
        tools = [{"type": "function", "function": WEATHER}]
        first = await chat_once(client, messages, is_streamed=is_streamed, tools=tools)
        assert first.finish_reason == "tool_calls" and first.message.content == "Let me look."
        (call,) = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "rainy"}
        messages += [first.message.model_dump(exclude_none=True), result]
        second = await chat_once(client, messages, is_streamed=is_streamed, tools=tools)
        assert (second.finish_reason, second.message.content) == ("stop", "Take an umbrella.")
    one, two = session.run.turns
    assert two.parent is one and two.response.input_tokens[: len(one.ids)] == one.ids
    assert ids_equal(session, model) and not session.run.branches


async def test_chat_numbers(model) -> None:
    async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
        asked = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
        whole = await client.chat.completions.create(**asked, n=1, temperature=0.3)
        assert [choice.message.content for choice in whole.choices] == ["Hello!"]
        (response,) = model.responses
        usage = whole.usage.prompt_tokens, whole.usage.completion_tokens
        assert usage == (response.input_len, response.output_len)
        assert whole.model == "any" and session.counts["ignored/temperature"] == 1
        cut = await client.chat.completions.create(**asked, max_completion_tokens=3)
        assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "Hel")
        pieces = [
            piece
            async for piece in await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert pieces[-1].usage.completion_tokens == len("Hello!") + 1 and pieces[-1].choices == []
        assert [name.id for name in (await client.models.list()).data] == ["policy"]
    assert len(session.run.turns) == 3 and session.run.turns[0].id == whole.id


async def test_stop_strings_stay_in_the_tokens_and_out_of_the_text(tokenizer) -> None:
    model = ScriptedModel(lambda prompt: "one two three", tokenizer)
    async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
        chat = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Count"}], stop=["two"]
        )
        assert chat.choices[0].message.content == "one " and chat.choices[0].finish_reason == "stop"
        async with anthropic_client(proxy, session) as other:
            message = await other.messages.create(
                model="m", max_tokens=99, messages=[{"role": "user", "content": "Go"}], stop_sequences=["two"]
            )
        assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    assert ids_equal(session, model)


async def respond(client, *, is_streamed, **options):
    if not is_streamed:
        return await client.responses.create(model="m", **options)
    async with client.responses.stream(model="m", **options) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_with_a_tool(model, is_streamed, by_id) -> None:
    tools = [{"type": "function", "strict": False, **WEATHER}]
    async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
        options = {"tools": tools, "instructions": "Be brief."}
        first = await respond(client, is_streamed=is_streamed, input="Oslo?", **options)
        said, call = first.output
        assert (first.status, first.output_text, call.type) == ("completed", "Let me look.", "function_call")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rainy"}
        if by_id:
            given = {"input": [result], "previous_response_id": first.id}
        else:
            history = [item.model_dump(exclude_none=True) for item in (said, call)]
            given = {"input": [{"role": "user", "content": "Oslo?"}, *history, result]}
        second = await respond(client, is_streamed=is_streamed, **given, **options)
        assert second.output_text == "Take an umbrella."
        assert second.usage.input_tokens == model.responses[1].input_len
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(model="m", input="?", previous_response_id="resp_other")
        assert refusal.value.code == "previous_response_not_found"
    one, two = session.run.turns
    assert two.parent is one and ids_equal(session, model) and not session.run.branches


@pytest.mark.parametrize("by_reference", [{"message"}, {"function_call"}, {"message", "function_call"}])
async def test_items_of_an_answer_may_come_as_references(model, by_reference) -> None:
    options = {"model": "m", "tools": [{"type": "function", "strict": False, **WEATHER}]}
    async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
        first = await client.responses.create(input="Oslo?", **options)
        before = copy.deepcopy(session.run.turns[0].message)
        result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rainy"}
        history = [
            {"type": "item_reference", "id": item.id}
            if item.type in by_reference
            else item.model_dump(exclude_none=True)
            for item in first.output
        ]
        second = await client.responses.create(
            input=[{"role": "user", "content": "Oslo?"}, *history, result], **options
        )
        assert second.output_text == "Take an umbrella."
        with pytest.raises(openai.BadRequestError, match="the answer before must be one of this run"):
            await client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_other"}])
    one, two = session.run.turns
    assert two.parent is one and one.message == before and not session.run.branches


async def ask(client, *, is_streamed, **options):
    options = {"model": "m", "max_tokens": 100} | options
    if not is_streamed:
        return await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_messages_with_a_tool(model, is_streamed) -> None:
    tool = {"name": "weather", "description": "Look up the weather.", "input_schema": WEATHER["parameters"]}
    async with proxied(model) as (proxy, session), anthropic_client(proxy, session) as client:
        messages = [{"role": "user", "content": "Oslo?"}]
        options = {"system": [{"type": "text", "text": "Be brief."}], "tools": [tool]}
        counted = await client.messages.count_tokens(model="m", messages=messages, **options)
        first = await ask(client, is_streamed=is_streamed, messages=messages, **options)
        said, call = first.content
        assert (said.text, call.name, call.input) == ("Let me look.", "weather", {"city": "Oslo"})
        assert first.stop_reason == "tool_use" and counted.input_tokens == first.usage.input_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rainy"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await ask(client, is_streamed=is_streamed, messages=messages, **options)
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "Take an umbrella.")
        assert second.usage.output_tokens == model.responses[1].output_len
    one, two = session.run.turns
    assert two.parent is one and ids_equal(session, model) and not session.run.branches


async def test_anthropics_tool_runner_keeps_its_thread_at_the_server(model) -> None:
    """It sends no history after the first turn."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Look up the weather.

        Args:
            city: where
        """
        return f"{city} is rainy"

    bodies = []

    async def note(request):
        bodies.append(json.loads(request.content))

    http = httpx2.AsyncClient(event_hooks={"request": [note]})
    async with proxied(model) as (proxy, session), anthropic_client(proxy, session, http_client=http) as client:
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=100, tools=[weather], messages=[{"role": "user", "content": "Oslo?"}], system="Brief."
        )
        final = await runner.until_done()
        assert final.content[0].text == "Take an umbrella."
    assert [len(body["messages"]) for body in bodies] == [1, 1] and "tools" not in bodies[1]
    one, two = session.run.turns
    assert two.parent is one and ids_equal(session, model) and not session.run.branches


async def test_arguments_of_more_than_64_bits(tokenizer) -> None:
    model = ScriptedModel(lambda prompt: tool_call("weather", f'{{"city":{10**30}}}'), tokenizer)
    tool = {"name": "weather", "input_schema": WEATHER["parameters"]}
    async with proxied(model) as (proxy, session), anthropic_client(proxy, session) as client:
        asked = [{"role": "user", "content": "Where?"}]
        reply = await client.messages.create(model="m", messages=asked, tools=[tool], max_tokens=150)
        assert reply.content[0].input == {"city": 10**30}


async def test_arguments_that_are_no_json_stay_text(model) -> None:
    for arguments in ("{", "[" * 100_000):
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        asked = [{"role": "user", "content": "Where?"}, {"role": "assistant", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "a", "content": "no JSON"}
        async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
            answer = await client.chat.completions.create(model="m", messages=[*asked, result])
            assert answer.choices[0].message.content == "Hello!"


@pytest.mark.parametrize(
    "path, body, code",
    [
        ("chat/completions", {"messages": []}, "must have at least one message"),
        ("chat/completions", {"messages": "hello"}, "must be one of"),
        ("chat/completions", {}, "must be one of"),
        ("chat/completions", {"messages": [{"role": "user"}], "functions": [{}]}, "functions must be left out"),
        ("chat/completions", {"messages": [{"role": "user"}], "tools": [{"type": "web"}]}, "tools must be functions"),
        ("chat/completions", {"messages": [{"role": "user"}], "max_tokens": 0}, "max_tokens must be at least 1"),
        ("chat/completions", {"messages": [{"role": "user"}], "stop": [1]}, "stop must be texts of at least one"),
        ("chat/completions", {"messages": [{"role": "user"}], "stop": {"a": 1}}, "stop must be texts of at least one"),
        ("chat/completions", {"messages": [{"role": "user"}], "n": 2}, "n must be 1: got 2"),
        ("chat/completions", {**ASKED, "stream": True, "stream_options": "usage"}, "stream_options must be of type"),
        ("chat/completions", {"messages": [{"role": "user"}], "logprobs": True}, "logprobs must be left out"),
        ("chat/completions", {"messages": [{"role": "user", "content": {"type": "text"}}]}, "content must be a text"),
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "got a part of type 'image_url'"),
        ("responses", {"input": [{"type": "computer_call"}]}, "items of input must be"),
        ("responses", {"input": "a", "background": True}, "background must be left out"),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "x"}]}]}, "assistant's blocks must be"),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": True}, "must be of type int"),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "stop_sequences": [""]}, "must be texts"),
    ],
)
async def test_requests_that_are_refused(model, path, body, code) -> None:
    async with proxied(model) as (proxy, session), httpx2.AsyncClient() as client:
        url, headers = f"{proxy.address}/v1/{path}", {"Authorization": f"Bearer {session.key}"}
        reply = await client.post(url, json=body, headers=headers)
        assert reply.status_code == 400 and reply.headers["x-should-retry"] == "false"
        assert code in reply.json()["error"]["message"]
        reply = await client.post(url, content=b"[1", headers=headers)
        assert "must be a JSON object" in reply.json()["error"]["message"]
    assert not model.responses and not session.run.turns


async def test_a_request_that_nothing_foresees_is_refused_too(tokenizer) -> None:
    broken = copy.deepcopy(tokenizer)
    broken.chat_template += '{% for m in messages if m.content == "divide" %}{{ m.content | length // 0 }}{% endfor %}'
    model = ScriptedModel(lambda prompt: "Hello!", broken)
    async with proxied(model) as (proxy, session), openai_client(proxy, session) as client:
        with pytest.raises(openai.BadRequestError, match="can be answered: got ZeroDivisionError") as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "divide"}])
    assert refused.value.code == "not_answered" and not model.responses

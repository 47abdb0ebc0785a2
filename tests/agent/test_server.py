"""What the proxy does about clients that wait, leave, come back, ask too much or too late."""

import asyncio
import functools

import anthropic
import httpx2
import openai
import pytest
from testing_proxy import ScriptedModel, ids_equal, proxied, until

from arealite.agent.server import Proxy
from arealite.api.errors import ContextOverflowError

pytestmark = pytest.mark.xdist_group("agent_packages")
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
READ_S = 2.0
"""Read timeout of impatient clients."""


@pytest.fixture
def model(tokenizer):
    return ScriptedModel(lambda prompt: "Hello!", tokenizer)


def openai_client(proxy, key, **options):
    return openai.AsyncOpenAI(base_url=f"{proxy.address}/v1", api_key=key, **options)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_heartbeats_keep_both_packages_waiting(model, is_streamed) -> None:
    model.may_answer = asyncio.Event()
    async with proxied(model, heartbeat_s=READ_S / 40) as (proxy, session):
        key, timeout = session.key, httpx2.Timeout(30, read=READ_S)
        async with (
            openai_client(proxy, key, timeout=timeout, max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=proxy.address, api_key=key, timeout=timeout, max_retries=0) as other,
        ):

            async def chat():
                if not is_streamed:
                    return (await one.chat.completions.create(**ASKED)).choices[0].message.content
                stream = await one.chat.completions.create(**ASKED, stream=True)
                return "".join([piece.choices[0].delta.content or "" async for piece in stream])

            async def message():
                if not is_streamed:
                    return (await other.messages.create(**ASKED, max_tokens=20)).content[0].text
                async with other.messages.stream(**ASKED, max_tokens=20) as stream:
                    return await stream.get_final_text()

            answers = asyncio.gather(chat(), message())
            await until(lambda: model.num_running == 2)
            await asyncio.sleep(1.25 * READ_S)
            model.may_answer.set()
            assert await answers == ["Hello!", "Hello!"]
    assert len(model.responses) == 2 and session.counts["retries"] == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_comes_back_gets_the_answer_that_it_left(model, is_streamed) -> None:
    model.may_answer = asyncio.Event()
    async with proxied(model) as (proxy, session):
        timeout = httpx2.Timeout(30, read=READ_S / 4)
        async with openai_client(proxy, session.key, timeout=timeout, max_retries=20) as client:
            answer = asyncio.create_task(client.chat.completions.create(**ASKED, stream=is_streamed))
            await until(lambda: session.counts["retries"] >= 2)
            model.may_answer.set()
            got = await answer
            if is_streamed:
                assert "".join([piece.choices[0].delta.content or "" async for piece in got]) == "Hello!"
        assert len(model.responses) == 1 and len(session.run.turns) == 1 and session.counts["orphans"] == 0


async def test_a_client_that_does_not_count_its_retries_gets_the_answer_too(model) -> None:
    """Once it was noticed that it had left."""
    model.may_answer = asyncio.Event()
    async with proxied(model, heartbeat_s=0.02) as (proxy, session), httpx2.AsyncClient() as client:
        headers = {"x-api-key": session.key}
        ask = functools.partial(client.post, f"{proxy.address}/v1/chat/completions", json=ASKED, headers=headers)
        first = asyncio.create_task(ask())
        await until(lambda: model.num_running == 1)
        first.cancel()
        await until(lambda: not session.num_busy)
        second = asyncio.create_task(ask())
        await until(lambda: session.num_busy)
        model.may_answer.set()
        assert (await second).json()["choices"][0]["message"]["content"] == "Hello!"
        assert len(model.responses) == len(session.run.turns) == session.counts["retries"] == 1


async def test_a_retry_of_an_answer_that_was_written_gets_it_again(model) -> None:
    """The proxy can't see that a whole answer was lost on its way."""
    async with proxied(model) as (proxy, session), httpx2.AsyncClient() as client:
        url, headers = f"{proxy.address}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
        first = (await client.post(url, json=ASKED, headers=headers)).json()
        again = (await client.post(url, json=ASKED, headers=headers | {"x-stainless-retry-count": "1"})).json()
        other = (await client.post(url, json=ASKED, headers=headers)).json()
        assert first == again and first["id"] != other["id"]
    assert [turn.id for turn in session.run.turns] == [first["id"], other["id"]]


async def test_equal_requests_at_once_are_siblings(model) -> None:
    async with proxied(model) as (proxy, session), openai_client(proxy, session.key) as client:
        model.may_answer = asyncio.Event()
        answers = asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(3)))
        await until(lambda: model.num_running == 3)
        model.may_answer.set()
        assert len({one.id for one in await answers}) == 3
    assert len(session.run.turns) == 3 and ids_equal(session, model)


@pytest.mark.parametrize("is_sampled", [False, True])
async def test_what_nobody_comes_back_for_is_cancelled_and_never_trained(model, is_sampled) -> None:
    model.may_answer = asyncio.Event()
    async with proxied(model, retry_grace=0.05) as (proxy, session), openai_client(proxy, session.key) as client:
        if is_sampled:  # what it then asks is parsed while it leaves
            model.may_answer.set()
            kept = await client.chat.completions.create(**ASKED)
            model.may_answer.clear()
        gone = asyncio.create_task(client.chat.completions.create(**ASKED))
        await until(lambda: model.num_running == 1)
        gone.cancel()
        await until(lambda: session.counts["orphans"] == 1 and model.num_cancelled == 1)
        model.may_answer.set()
        assert [turn.id for turn in session.run.turns] == ([kept.id] if is_sampled else [])


async def test_what_was_continued_is_no_orphan(model) -> None:
    """Its client closed the connection before the proxy could see that the answer had arrived."""
    async with proxied(model, retry_grace=0.05) as (proxy, session), openai_client(proxy, session.key) as client:
        first = await client.chat.completions.create(**ASKED)
        (delivery,) = next(iter(session._deliveries.values()))
        await until(lambda: not delivery.num_clients)
        more = [*ASKED["messages"], {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Again"}]
        second = await client.chat.completions.create(model="m", messages=more)
        delivery.num_delivered, delivery.num_clients = 0, 1
        proxy.loop.call_soon(lambda: session.leave(delivery))
        await until(lambda: delivery.is_over)
        await proxy.end(session)
        await asyncio.to_thread(session.model.tokenizing.submit(int).result)
    rows = session.run.rows(1.0, {first.id: 1.0, second.id: 2.0})
    assert rows["loss_mask"].sum() == sum(one.output_len for one in model.responses)


async def test_who_comes_back_too_late_gets_another_answer(model) -> None:
    async with proxied(model, retry_grace=0.01) as (proxy, session), httpx2.AsyncClient() as client:
        url, headers = f"{proxy.address}/v1/responses", {"Authorization": f"Bearer {session.key}"}
        body = {"input": "Hi"}
        first = (await client.post(url, json=body, headers=headers)).json()
        (delivery,) = next(iter(session._deliveries.values()))
        await until(lambda: not delivery.num_clients)
        delivery.num_delivered, delivery.num_clients = 0, 1
        proxy.loop.call_soon(lambda: session.leave(delivery))
        await until(lambda: not session.run.turns)
        again = (await client.post(url, json=body, headers=headers | {"x-stainless-retry-count": "1"})).json()
        assert [turn.id for turn in session.run.turns] == [again["id"]] != [first["id"]]
        reply = await client.post(url, json={"input": "So?", "previous_response_id": first["id"]}, headers=headers)
        assert reply.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
async def test_its_address_is_one_where_it_listens(host) -> None:
    proxy = await asyncio.to_thread(Proxy, heartbeat_s=1.0, host=host)
    try:
        async with httpx2.AsyncClient() as client:
            assert (await client.get(f"{proxy.address}/v1/models")).status_code == 401
    finally:
        await asyncio.to_thread(proxy.close)


async def test_late_requests_change_nothing(model) -> None:
    async with proxied(model) as (proxy, session), openai_client(proxy, session.key, max_retries=3) as client:
        model.may_answer = asyncio.Event()
        waiting = asyncio.create_task(client.chat.completions.create(**ASKED))
        await until(lambda: model.num_running == 1)
        await proxy.end(session)
        with pytest.raises(openai.ConflictError) as during:
            await waiting
        assert during.value.code == "run_ended"
        for key in (session.key, "sk-other"):
            with pytest.raises(openai.AuthenticationError, match="Make a client for each run"):
                await client.with_options(api_key=key).chat.completions.create(**ASKED)
        await until(lambda: model.num_cancelled == 1)
    assert not session.run.turns and session.counts["orphans"] == 1


async def test_limits_end_a_run_with_a_reason(model) -> None:
    async with proxied(model, max_turns=2) as (proxy, session), openai_client(proxy, session.key) as client:
        for _ in range(2):
            await client.chat.completions.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match="at most 2 turns") as refusal:
            await client.chat.completions.create(**ASKED)
        assert refusal.value.code == session.limit == "max_turns" and len(model.responses) == 2
        with pytest.raises(openai.APIError, match="at most 2 turns"):
            await client.chat.completions.create(**ASKED, stream=True)


async def test_the_tokens_of_a_run_are_limited(model) -> None:
    async with proxied(model, max_sampled_tokens=9) as (proxy, session), openai_client(proxy, session.key) as client:
        lengths = [(await client.chat.completions.create(**ASKED)).usage.completion_tokens for _ in range(2)]
        assert lengths == [7, 2]
        with pytest.raises(openai.BadRequestError, match="at most 9 tokens"):
            await client.chat.completions.create(**ASKED)
    assert session.limit == "max_sampled_tokens"


async def test_a_full_context_is_told_in_words_that_agents_know(model) -> None:
    model.errors = [ContextOverflowError("the server takes 256 tokens") for _ in range(2)]
    async with proxied(model) as (proxy, session), openai_client(proxy, session.key) as client:
        with pytest.raises(openai.BadRequestError, match="prompt is too long") as refusal:
            await client.chat.completions.create(**ASKED)
        assert refusal.value.code == "context_length_exceeded"
        async with anthropic.AsyncAnthropic(base_url=proxy.address, api_key=session.key) as other:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await other.messages.create(**ASKED, max_tokens=20)
        assert (await client.chat.completions.create(**ASKED)).choices[0].message.content == "Hello!"
    assert session.limit == "context" and not session.failure.done()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_error_after_heartbeats_reaches_the_client(model, is_streamed) -> None:
    """Its status is sent by then: a stream ends with an error, anything else is broken off and asked again."""
    model.may_answer, model.errors = asyncio.Event(), [ContextOverflowError("the server takes 256 tokens")]
    async with proxied(model, heartbeat_s=0.02) as (proxy, session), openai_client(proxy, session.key) as client:

        async def ask():
            answer = await client.chat.completions.create(**ASKED, stream=is_streamed)
            return [piece async for piece in answer] if is_streamed else answer

        answer = asyncio.create_task(ask())
        await until(lambda: model.num_running == 1)
        await asyncio.sleep(0.1)
        model.may_answer.set()
        with pytest.raises(openai.APIError, match="prompt is too long"):
            await answer
    assert not model.responses


async def test_requests_run_in_the_context_and_loop_of_the_episode(model) -> None:
    from contextvars import ContextVar

    name: ContextVar[str] = ContextVar("name")
    seen = []
    answer, loop = model.agenerate, asyncio.get_running_loop()

    async def agenerate(request):
        seen.append((name.get(None), asyncio.get_running_loop() is loop, request.seed_key))
        return await answer(request)

    model.agenerate = agenerate
    name.set("episode")
    async with proxied(model) as (proxy, session), openai_client(proxy, session.key) as client:
        name.set("agent")
        await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(3)))
    assert seen == [("episode", True, "0")] * 3


async def test_what_changes_nothing_is_named_in_one_warning_of_the_proxy(model, caplog) -> None:
    async with proxied(model) as (proxy, session):
        async with openai_client(proxy, session.key) as client:
            await client.chat.completions.create(**ASKED, temperature=0, seed=7, presence_penalty=0)
        for _ in range(2):
            await proxy.end(session)
    warnings = [one.getMessage() for one in caplog.records if "changes nothing" in one.getMessage()]
    assert warnings == [
        "agents ask for seed, temperature, which changes nothing: gconfig says how completions are sampled"
    ]

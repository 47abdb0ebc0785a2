"""What clients of servers make of answers that are not those of a server, and of running out of files."""

from __future__ import annotations

import asyncio
import resource
import socket
import traceback
from typing import Any, Literal, cast

import pytest
from testing_raw import REPLIES, answering, json_reply

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ServerError, UnreachableError
from arealite.api.io_struct import ModelRequest
from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.completions import Completions
from arealite.inference.http import Json, OutOfFilesError, ServerConnection, StatusError, deadline_in, open_session
from arealite.inference.pool import ServerPool
from arealite.planner.scenario import ServerProfile
from arealite.simulate.servers import SimulatedServer, SimulatedSession
from arealite.simulate.virtual import VirtualLoop

SECRET = "s3cret"


async def ask(address: str, method: Literal["GET", "POST"] = "GET") -> Json:
    async with open_session(SECRET) as session:
        return await ServerConnection(session, address, deadline_in(60)).request(method, "/health")


def check_silent(error: BaseException) -> None:
    """Check that neither the error nor what led to it shows the secret, as a task that dies of it is logged."""
    assert SECRET not in repr(error) + repr(error.__cause__) + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("kind", REPLIES)
async def test_another_program_at_the_address_is_no_server(kind: str, method: Literal["GET", "POST"]) -> None:
    """A server that died may have left its port to any program."""
    with answering(REPLIES[kind]) as address, pytest.raises(ServerError) as caught:
        await ask(address, method)
    assert str(caught.value).startswith(f"{method} http://{address}/health must ")
    by_status = {"bad redirect": 302, "redirect": 302, "other protocol": 101}
    if kind in by_status:
        assert isinstance(caught.value, StatusError) and caught.value.status == by_status[kind]
    else:
        assert isinstance(caught.value, UnreachableError)
    check_silent(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "[::1", "a:b", "", "a b:1"])
async def test_what_is_no_address_reaches_no_server(address: str) -> None:
    with pytest.raises(UnreachableError, match="must reach a server") as caught:
        await ask(address)
    check_silent(caught.value)


@pytest.mark.parametrize("body", [b"[1, 2]", b'"abc"', b"7", b"null"])
async def test_json_that_is_no_object_is_no_reply(body: bytes) -> None:
    with answering(json_reply(body)) as address, pytest.raises(ServerError, match="must be a JSON object") as caught:
        await ask(address)
    assert body.decode() in str(caught.value) and address in str(caught.value)
    with answering(json_reply(b"[" * 100_000)) as address, pytest.raises(ServerError, match="must answer with JSON"):
        await ask(address)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n%s",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
    ],
)
@pytest.mark.parametrize(
    "body", [b"Authorization: Bearer s3cret", b'{"success": false, "got": "s3cret"}', b'["s3cret"]']
)
async def test_a_server_that_echoes_the_request_does_not_show_the_secret(reply: bytes, body: bytes) -> None:
    with answering(reply % (len(body), body)) as address, pytest.raises(ServerError, match=r"\*\*\*") as caught:
        await ask(address)
    check_silent(caught.value)


async def test_a_process_without_files_says_so_and_accuses_no_server() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with answering(json_reply(b"{}")) as address:
        async with open_session(SECRET) as session:
            connection, taken = ServerConnection(session, address, deadline_in(60)), [socket.socket()]
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0].fileno() + 8, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    while True:
                        taken.append(socket.socket())
                with pytest.raises(OutOfFilesError, match=r"too many open files.*Raise `ulimit -n`") as caught:
                    await connection.request("GET", "/health")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for one in taken:
                    one.close()
            assert not isinstance(caught.value, UnreachableError)
            assert await connection.request("GET", "/health") == {}


async def turns_of_replies(num_tokens: int) -> list[str]:
    """Let three completions end at one moment; return the replies and the turns of the loop, in order."""
    loop, pool, order = asyncio.get_running_loop(), ServerPool(), []
    server = SimulatedServer("s:1", ServerProfile(), loop)
    config, session = InferenceEngineConfig(experiment_name="e", trial_name="t"), SimulatedSession({"s:1": server})
    completions = Completions(config, SGLangBackend(pause_mode="abort"), pool, cast("Any", session))
    pool.add("s:1")
    pool.begin(0)
    request = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=num_tokens))

    async def sample() -> None:
        response = await completions.generate(request)
        order.append("reply")
        loop.call_soon(order.append, "turn")
        assert response.output_tokens == [7] * num_tokens and response.output_versions == [0] * num_tokens
        assert response.output_logprobs == [-0.5] * num_tokens

    await asyncio.gather(*(sample() for _ in range(3)))
    await asyncio.sleep(0)
    return order


@pytest.mark.parametrize(("num_tokens", "order"), [(4096, ["reply", "turn"] * 3), (1024, ["reply"] * 3 + ["turn"] * 3)])
def test_each_of_long_replies_that_come_at_once_has_a_turn_of_the_loop(num_tokens: int, order: list[str]) -> None:
    """Four hundred of them stopped the loop, and all that it serves, for 16 seconds; short ones lose no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(turns_of_replies(num_tokens)) == order

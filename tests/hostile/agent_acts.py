"""What agents do wrong, and what must become of it. Imports no torch: processes import it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

from arealite.api.errors import EnvError, RewardError
from hostile.rewards import RAISED

DONE = {"trained", "accepted"}
OWN, CRASHED, LATE, ENV = {"failed_agent"}, {"failed_workflow"}, {"failed_timeout"}, {"failed_environment"}
_HUGE_MIB = 65


class Nameless:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


NO_REWARDS: tuple[Callable[[], Any], ...] = (
    *(list, object, lambda: [1.0], lambda: b"x", lambda: 1j, lambda: "good", lambda: (1,), lambda: ..., lambda: type),
    *(lambda: float("nan"), lambda: -1e999, lambda: 10**400, lambda: "nan", lambda: {"x": 1.0}, lambda: {1: 2}),
    *(lambda: {"x": None}, lambda: {"x": 1e308, "y": 1e308}, lambda: {"": float("nan")}),
)
"""Of runs."""


def states_of(error: Callable[[], BaseException]) -> set[str]:
    """Return what an episode ends as that raises this."""
    found = error()
    if isinstance(found, EnvError):
        return ENV
    return {"failed_reward_exception"} if isinstance(found, RewardError) else CRASHED


# Agents that are coroutines


class Client:
    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key

    async def ask(self, text: str) -> str:
        """Return the id of an answer."""
        return str((await self.post("/chat/completions", json={"messages": [{"role": "user", "content": text}]}))["id"])

    async def post(self, path: str, **body: Any) -> Any:
        """Return what is answered, whose status must be good."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.base_url}{path}", headers=headers, **body) as reply,
        ):
            reply.raise_for_status()
            return await reply.json()


Act = Callable[[Client], Awaitable[Any]]


async def _talks(client: Client) -> float:
    await client.ask("Hi")
    return 1.0


async def _is_huge(client: Client) -> float:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(_HUGE_MIB):
            yield b" " * 2**20

    await client.post("/chat/completions", data=pieces())
    return 1.0


async def _leaves(client: Client) -> float:
    """Ask, and be gone before the answer is there."""
    request = _request(client, b'{"messages": [{"role": "user", "content": "slowly"}]}')
    await _send(client, request)
    return 1.0


async def _talks_after_junk(client: Client) -> float:
    for body in (b"", b"[]", b"{", b'{"messages": 5}', b'{"messages": [[]]}', b"\xff", b'{"n": NaN}', b"[" * 10**5):
        with contextlib.suppress(aiohttp.ClientResponseError):
            await client.post("/chat/completions", data=body)
            return -1.0
    for path in ("/messages", "/responses", "/messages/count_tokens"):
        with contextlib.suppress(aiohttp.ClientResponseError):
            await client.post(path, json={"messages": [{"role": 5}], "input": {"x": 1}})
            return -1.0
    whole = _request(client, b'{"messages": []}')
    for cut in (5, len(whole) // 2, len(whole) - 1):
        await _send(client, whole[:cut])
    return await _talks(client)


async def _asks_in_crowds(client: Client) -> dict[str, float]:
    return dict.fromkeys(await asyncio.gather(*(client.ask("Hi") for _ in range(20))), 0.1)


def _request(client: Client, body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _send(client: Client, data: bytes) -> None:
    """Send bytes, and break the connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", urllib.parse.urlsplit(client.base_url).port)
    writer.write(data)
    await writer.drain()
    writer.transport.abort()


async def _comes_late(client: Client) -> float:
    async def come() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                await client.ask("Still there?")

    await client.ask("Hi")
    _kept.append(asyncio.create_task(come()))
    return 1.0


async def _blocks_the_others(client: Client) -> float:
    time.sleep(0.2)
    return await _talks(client)


async def _hangs(client: Client) -> float:
    await client.ask("Hi")
    return await asyncio.get_running_loop().create_future()


async def _ignores_its_end(client: Client) -> float:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
    return 1.0


def _raises(error: Callable[[], BaseException]) -> Act:
    async def act(client: Client) -> float:
        await client.ask("Hi")
        raise error()

    return act


def _returns(value: Callable[[], Any]) -> Act:
    async def act(client: Client) -> Any:
        await client.ask("Hi")
        return value()

    return act


_kept: list[Any] = []
COROUTINES: dict[str, tuple[Act, set[str]]] = {
    "talks": (_talks, DONE),
    "is huge": (_is_huge, CRASHED),
    "leaves": (_leaves, OWN),
    "talks after junk": (_talks_after_junk, DONE),
    "asks in crowds": (_asks_in_crowds, DONE),
    "comes late": (_comes_late, DONE),
    "blocks the others": (_blocks_the_others, DONE),
    "hangs": (_hangs, LATE),
    "ignores its end": (_ignores_its_end, LATE),
    **{f"raises {number}": (_raises(error), states_of(error)) for number, error in enumerate(RAISED)},
    **{f"returns {number}": (_returns(value), OWN) for number, value in enumerate(NO_REWARDS)},
    "returns what has no text": (_returns(Nameless), OWN | CRASHED),
}


async def coroutine(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    return await COROUTINES[data["act"]][0](Client(base_url, api_key))


# Agents in processes


def _ask() -> None:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()


FUNCTIONS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "talks": (lambda: _ask() or 1.0, DONE),
    "exits": (lambda: sys.exit(3), OWN),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGSEGV), OWN),
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), LATE),
    "closes files": (lambda: os.closerange(0, 1000), OWN),
    "prints": (lambda: print("\x1b]" * 10**6) or _ask() or 1.0, DONE),
    "returns an object": (lambda: _ask() or object(), OWN),
}


def function(data: dict[str, Any]) -> Any:
    return FUNCTIONS[data["act"]][0]()


COMMANDS: dict[str, set[str]] = {
    "kill -9 $$": OWN,
    "echo NaN": OWN,
    "echo 1": OWN,
    "head -c 3000000 /dev/zero": OWN,
    "sleep 3600 > /dev/null & exit 3": OWN,
    "sleep 3600": LATE,
}
"""None of them asks the model."""

"""Agents that do to the proxy what agents do: they give up, ask again, leave, crash, hang and lie.

What the runs of a prompt do follows from the number of the prompt, so that it is known what must become of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

FIRST_PATIENCE_S = 0.03
READ: defaultdict[str, list[str]] = defaultdict(list)
"""Ids of the answers that the clients of a run have read to the end, by the key of the run."""
_late: set[asyncio.Task[Any]] = set()


@dataclass(frozen=True)
class Client:
    """What a program with a plain HTTP library sees of the model."""

    http: aiohttp.ClientSession
    url: str
    key: str

    def post(self, *contents: str, timeout_s: float | None = None, **options: Any) -> Any:
        """Ask with these contents of user and assistant in turn."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        headers, timeout = {"Authorization": f"Bearer {self.key}"}, aiohttp.ClientTimeout(timeout_s)
        return self.http.post(self.url, json={"messages": messages, **options}, headers=headers, timeout=timeout)

    async def ask(self, *contents: str, timeout_s: float | None = None) -> str:
        """Return the text of an answer."""
        async with self.post(*contents, timeout_s=timeout_s) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        READ[self.key].append(answer["id"])
        return str(answer["choices"][0]["message"]["content"])


async def talks(client: Client, question: str) -> float:
    answer = await client.ask(question)
    return len(await client.ask(question, answer, "Are you sure?")) % 2


async def loses_patience(client: Client, question: str) -> float:
    """Break off the request, and ask the same again."""
    for patience_s in (FIRST_PATIENCE_S * 3**number for number in itertools.count()):
        try:
            return len(await client.ask(question, timeout_s=patience_s)) % 2
        except TimeoutError:
            continue
    raise AssertionError


async def leaves(client: Client, question: str) -> float:
    """Begin a request that nobody ever comes back for."""
    gone = asyncio.create_task(client.ask("Never mind."))
    await asyncio.sleep(FIRST_PATIENCE_S)
    gone.cancel()
    return await talks(client, question)


async def hangs_up(client: Client, question: str) -> float:
    """Close a connection amid a stream."""
    async with client.post(question, stream=True) as reply:
        await reply.content.readany()
    return await talks(client, question)


async def branches(client: Client, question: str) -> float:
    """Ask the same three times at once, and sub-agents."""
    answers = await asyncio.gather(*[client.ask(question) for _ in range(3)], client.ask("Name a number."))
    return len(await client.ask(question, answers[1], "Are you sure?")) % 2


async def comes_late(client: Client, question: str) -> float:
    """Leave a task behind that goes on after the end of the run."""
    reward = await talks(client, question)
    _late.add(task := asyncio.create_task(_ask_on(client)))
    task.add_done_callback(_late.discard)
    return reward


async def _ask_on(client: Client) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(5):
            async with Client(http, client.url, client.key).post("Still there?"):
                await asyncio.sleep(FIRST_PATIENCE_S)


async def crashes(client: Client, question: str) -> float:
    await client.ask(question)
    raise ZeroDivisionError("the agent has a defect")


async def hangs(client: Client, question: str) -> float:
    await client.ask(question)
    return await asyncio.get_running_loop().create_future()


async def lies(client: Client, question: str) -> Any:
    """Return the reward of an answer that nobody got."""
    await client.ask(question)
    return {"chatcmpl-of-another-run": 1.0}


async def is_not_a_number(client: Client, question: str) -> float:
    await client.ask(question)
    return float("nan")


async def says_nothing(client: Client, question: str) -> float:
    return 1.0


async def rejects(client: Client, question: str) -> None:
    await client.ask(question)


Act = Callable[[Client, str], Awaitable[Any]]
KINDS: dict[Act, str] = {
    crashes: "workflow",
    hangs: "timeout",
    lies: "agent",
    is_not_a_number: "agent",
    says_nothing: "agent",
}
"""What an attempt fails with in which an agent does this."""
PLANS: tuple[tuple[Act, Act], ...] = (
    *((act, act) for act in (talks, loses_patience, leaves, hangs_up, branches, comes_late, rejects)),
    *((act, talks) for act in (crashes, hangs, lies)),
    *((act, act) for act in (crashes, is_not_a_number, says_nothing)),
)
"""What one of the runs of a prompt does in its first and its second attempt; the others talk."""


def plan_of(index: int) -> tuple[Act, Act]:
    """Return what happens to the prompt with this index in the data set."""
    return PLANS[index % len(PLANS)]


async def agent(data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Do what the prompt's number says in one run of each group."""
    act = plan_of(data["prompt_id"].index)[data["attempt"]] if next(data["runs"]) == 1 else talks
    async with aiohttp.ClientSession() as http:
        return await act(Client(http, f"{base_url}/chat/completions", api_key), data["messages"][0]["content"])

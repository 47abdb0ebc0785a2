"""Environments of an OpenEnv server, by its WebSocket: an episode is a connection, which is a session of the server.

A session that can't be had is tried again. A connection that is lost takes the state of its episode with it, so that
the episode fails.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from arealite.api.config.openenv import openenv_server
from arealite.api.env_api import Agent
from arealite.api.errors import ConfigError, EnvError
from arealite.reward.functions import load_named

Json = dict[str, Any]


class OpenEnvAgent(Agent):
    """Passes texts on: each environment translates them, as the options of its server say."""

    def observe(self, observation: str, info: Json) -> list[Json]:
        return [{"role": "user", "content": observation}]

    def act(self, message: Json) -> str:
        return str(message["content"])


class SessionError(EnvError):
    """The server gives no session, or the connection is lost."""


class OpenEnv:
    """The environment of one episode, in texts; the row's `environment` is the name of the server."""

    def __init__(self, data: Json) -> None:
        server = self._server = openenv_server(data["environment"])
        self._action = _function("action", server.action)
        self._text = _function("observation", server.observation) or text_of
        self._cleanup = contextlib.AsyncExitStack()

    async def areset(self, *, seed: int) -> tuple[str, Json]:
        loop, retry_s, pause_s = asyncio.get_running_loop(), 0.8 * self._server.step_timeout, 0.1
        end = loop.time() + retry_s  # before that of the workflow, whose error can't say why
        while True:
            try:
                await self._open()
                answer = await self._ask("reset", {**(self._server.model_extra or {}), "seed": seed})
                return self._text(answer["observation"]), {}
            except (aiohttp.ClientError, SessionError) as error:
                await self.aclose()
                if loop.time() + pause_s > end:
                    got = f"{self._server.address} must give a session within {retry_s:g} s: got {error}"
                    fix = "Start it, with as many sessions as episodes run at once, or set the option sessions."
                    raise EnvError(f"{got.rstrip('.')}. {fix}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    async def astep(self, text: str) -> tuple[str, float, bool, bool, Json]:
        answer = await self._ask("step", self._action(text))
        return self._text(answer["observation"]), float(answer["reward"] or 0.0), answer["done"], False, {}

    async def aclose(self) -> None:
        await self._cleanup.aclose()

    async def check(self) -> None:
        """Begin an episode and end it. Raises ConfigError and EnvError."""
        try:
            async with self._cleanup, asyncio.timeout(timeout_s := self._server.step_timeout):
                await self.areset(seed=self._server.seed)
        except TimeoutError as error:
            message = f"reset of {self._server.address} must end within step_timeout = {timeout_s:g} s: it did not."
            raise EnvError(f"{message} Make it faster, or raise that option.") from error

    async def _open(self) -> None:
        http = await self._cleanup.enter_async_context(aiohttp.ClientSession())
        self._action = self._action or await self._text_action(http)
        connection = http.ws_connect(f"{self._server.address}/ws", max_msg_size=0)
        self._socket = await self._cleanup.enter_async_context(connection)
        self._received = asyncio.create_task(self._socket.receive())  # always one, which also answers pings

    async def _text_action(self, http: aiohttp.ClientSession) -> Callable[[str], Json]:
        """Return the function that makes an action of a text, if its only field is one. Raises ConfigError."""
        async with http.get(f"{self._server.address}/schema", raise_for_status=True) as reply:
            fields = (await reply.json())["action"].get("properties", {})
        names = [name for name, field in fields.items() if name != "metadata" and "const" not in field]
        if [fields[name].get("type") for name in names] != ["string"] or "enum" in fields[names[0]]:
            got = f"an action of {self._server.address} must have one field, a text: got {', '.join(names) or 'none'}."
            raise ConfigError(f"{got} Add the option action=FILE.py:FUNCTION, which makes an action of a text.")
        return lambda text: {names[0]: text}

    async def _ask(self, kind: str, data: Json) -> Json:
        """Return what the server answers to a message. Raises EnvError."""
        with contextlib.suppress(ConnectionError):  # what was received says why
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._received
        if message.type is not aiohttp.WSMsgType.TEXT:
            lost = f"the connection of an episode to {self._server.address} must last, as its state is lost with it"
            raise SessionError(f"{lost}: got {message.type.name} {message.data or ''} at {kind}. See the server's log.")
        self._received = asyncio.create_task(self._socket.receive())
        answer: Json = json.loads(message.data)
        if answer["type"] == "error":
            error = SessionError if answer["data"]["code"] == "CAPACITY_REACHED" else EnvError
            raise error(f"{kind} of {self._server.address} must not fail: got {answer['data']}. See the server's log.")
        return dict(answer["data"])


def _function(key: str, name: str | None) -> Any:
    return name and load_named(name, key=key, kind="function")


def text_of(observation: Json) -> str:
    """Return the only text of an observation, else all of it as JSON, both without its metadata."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    texts = [value for value in fields.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)

"""Names of OpenEnv servers, their rows, and actions that no text can be; tests/ecosystem runs the package's server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from arealite.api.config.openenv import openenv_server
from arealite.api.errors import ConfigError
from arealite.dataset import get_custom_dataset
from arealite.dataset.sources import MissingSplitError
from arealite.workflow.openenv import OpenEnv, text_of


def test_options_of_a_name_and_keywords_of_reset() -> None:
    path = "openenv:https://my-space.hf.space/env/?tasks=7&seed=3&action=my.py:act&index=2&split=train&deep=%5B1%2C2%5D"
    server = openenv_server(path)
    assert (server.address, server.tasks, server.seed) == ("https://my-space.hf.space/env", 7, 3)
    assert (server.action, server.observation, server.sessions, server.step_timeout) == ("my.py:act", None, None, 30.0)
    assert server.model_extra == {"index": 2, "split": "train", "deep": [1, 2]}


REFUSED = [
    ("openenv:127.0.0.1:8000", "an OpenEnv server must be openenv:http://HOST:PORT?option=value: got openenv:127.0"),
    ("verifiers:my_env", "an OpenEnv server must be openenv:http://HOST:PORT?option=value: got verifiers:my_env"),
    ("openenv:http://h:1?tasks=0", "tasks of openenv:http://h:1?tasks=0 must be greater than 0: got 0. Correct it."),
    ("openenv:http://h:1?sessions=many", "sessions of openenv:http://h:1?sessions=many must be a valid integer: got "),
    ("openenv:http://h:1?step_timeout=0", "must be greater than 0: got 0. Correct it."),
]


@pytest.mark.parametrize(("path", "told"), REFUSED)
def test_names_that_are_none(path: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        openenv_server(path)


def test_functions_that_are_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"action must be FILE\.py:FUNCTION or module:FUNCTION that exists: got no\.py:f"
    ):
        OpenEnv({"environment": "openenv:http://h:1?action=no.py:f"})


def test_each_row_has_a_seed_and_no_server_is_asked() -> None:
    path = "openenv:http://127.0.0.1:1?tasks=3&seed=10&action=my.py:act"
    rows = get_custom_dataset(path, type="rl")
    assert [(row["seed"], row["environment"]) for row in rows] == [(10, path), (11, path), (12, path)]
    assert rows[0]["messages"] == [{"role": "user", "content": "task 10 of http://127.0.0.1:1"}]
    with pytest.raises(MissingSplitError):
        get_custom_dataset(path, type="rl", split="test")


def test_the_text_of_an_observation() -> None:
    assert text_of({"text": "hi", "other": "", "board": [1], "metadata": {"answer": 3}}) == "hi"
    assert text_of({"stdout": "é", "stderr": "no", "metadata": {}}) == '{"stdout": "é", "stderr": "no"}'
    assert text_of({"board": [1], "metadata": {"answer": 3}}) == '{"board": [1]}'


@pytest_asyncio.fixture
async def schema() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Serve a schema that the test fills in."""
    fields: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(
            {"action": {"type": "object", "properties": {"metadata": {"type": "object"}, **fields}}}
        )

    app = web.Application()
    app.router.add_get("/schema", answer)
    async with TestServer(app) as server:
        yield f"openenv:http://127.0.0.1:{server.port}?step_timeout=0.1", fields


ACTIONS = [
    ({}, "none"),
    ({"move": {"type": "integer"}}, "move"),
    ({"code": {"type": "string"}, "language": {"type": "string"}}, "code, language"),
    (
        {"type": {"const": "call_tool", "type": "string"}, "tool_name": {"type": "string"}, "arguments": {}},
        "tool_name, arg",
    ),
    ({"move": {"type": "string", "enum": ["left", "right"]}}, "move"),
]


@pytest.mark.parametrize(("given", "told"), ACTIONS)
async def test_actions_that_no_text_can_be(schema: Any, given: dict[str, Any], told: str) -> None:
    path, fields = schema
    fields.update(given)
    with pytest.raises(
        ConfigError, match=rf"must have one field, a text: got {told}.* option action=FILE\.py:FUNCTION"
    ):
        await OpenEnv({"environment": path}).check()


async def test_a_server_of_something_else_is_named(schema: Any) -> None:
    path, fields = schema
    fields.update({"message": {"type": "string"}})
    async with asyncio.timeout(60):
        with pytest.raises(Exception, match=r"http://127.* must give a session within 0.08 s: got 404"):
            await OpenEnv({"environment": path}).check()

"""Who is let in: our ASGI middleware by itself, and every endpoint of the real servers where they are installed."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from harness.wire import ask
from servers.programs import Name, program, served
from testing_quickstart import make_tiny_model

from arealite.launcher.serve.wrapper import Message, RequireSecret
from arealite.utils.processes import descendants
from arealite.utils.secret import SECRET_VARIABLE, authorization

SECRET = "0123456789abcdef-the-secret"
PYTHONS = {name: os.environ.get(f"AREALITE_{name.upper()}_PYTHON", "") for name in get_args(Name)}


def answer(app: RequireSecret, scope: Message) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("a refusal reads nothing")

    asyncio.run(app({"headers": [], "path": "/generate", **scope}, receive, send))
    return sent


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> RequireSecret:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)

    async def app(scope: Message, receive: object, send: Any) -> None:
        await send({"passed": scope["type"]})

    return RequireSecret(app)


def shown(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), (b"authorization", authorization(secret)["Authorization"].encode())]


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "http", "method": "POST", "headers": shown(SECRET)},
        {"type": "websocket", "headers": shown(SECRET)},
        {"type": "http", "method": "GET", "path": "/health"},
        {"type": "lifespan", "path": ""},
    ],
)
def test_what_passes(guarded: RequireSecret, scope: Message) -> None:
    assert answer(guarded, scope) == [{"passed": scope["type"]}]


@pytest.mark.parametrize("path", ["/generate", "/health/", "/health_generate", "/metrics", "//health", ""])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("headers", [[], shown("other"), [(b"authorization", b"\xff")]])
def test_requests_without_the_secret_are_refused(
    guarded: RequireSecret, path: str, method: str, headers: list[tuple[bytes, bytes]]
) -> None:
    start, body = answer(guarded, {"type": "http", "method": method, "path": path, "headers": headers})
    assert start["status"] == 401
    assert f"{method} {path} must show the secret of the run" in json.loads(body["body"])["message"]


def test_websockets_without_the_secret_are_refused(guarded: RequireSecret) -> None:
    assert answer(guarded, {"type": "websocket", "path": "/v1/realtime"}) == [{"type": "websocket.close", "code": 1008}]


def test_without_a_secret_everything_passes(guarded: RequireSecret, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "")
    app = RequireSecret(guarded._app)
    assert answer(app, {"type": "http", "method": "POST"}) == [{"passed": "http"}]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_every_endpoint_of_a_real_server_but_health_wants_the_secret(name: Name, tmp_path: Path) -> None:
    if not PYTHONS[name]:
        pytest.skip(f"AREALITE_{name.upper()}_PYTHON names no interpreter with {name} installed")
    model = make_tiny_model(tmp_path / "model", hidden=64, layers=1, max_position=1024, tie=False)
    real, log = program(name, PYTHONS[name]), tmp_path / "log.txt"
    with served(replace(real, env=real.env | {SECRET_VARIABLE: SECRET}), model, log) as address:
        for pid in descendants(os.getpid()):
            assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text(), "a command line is seen by everybody"
        schema = ask(address, "GET", "/openapi.json", secret=SECRET).body
        known = [(method.upper(), path) for path, methods in schema["paths"].items() for method in methods]
        more = ["/metrics", "/metrics/", "/ready", "/docs", "/openapi.json", "/nothing", "/health_generate"]
        assert len(known) > 20
        for method, path in [*known, *(("GET", path) for path in more), ("OPTIONS", "/generate"), ("HEAD", "/")]:
            for shows in (None, "other"):
                expected = 200 if (method, path) == ("GET", "/health") else 401
                assert ask(address, method, path, secret=shows).status == expected, (method, path)
        assert ask(address, "GET", "/v1/models", secret=SECRET).status == 200
    assert SECRET not in log.read_text()

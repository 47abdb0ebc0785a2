"""Who may ask a server what: every endpoint but GET /health wants the secret, if there is one."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from aiohttp import web
from testing_lite import LiteServer
from testing_server import serve
from tiny_models import build, config

from arealite.inference.http import ServerConnection, StatusError, deadline_in, open_session
from arealite.server.__main__ import main
from arealite.server.app import Server
from arealite.utils.secret import SECRET_VARIABLE, authorization

SECRET = "s3cret"


class GuardedServer(LiteServer):
    def app(self) -> web.Application:
        return Server(self.engine, model_path="tiny", secret=SECRET).app


@pytest.fixture(scope="module")
def server() -> Iterator[LiteServer]:
    with serve(GuardedServer(build(config(), seed=0))) as one:
        yield one


def status(server: LiteServer, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    request = urllib.request.Request(f"http://{server.address}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        told = json.load(error)["error"]["message"] if method != "HEAD" else ""
        assert error.code != 401 or method == "HEAD" or f"{method} {path} must show the secret of the run" in told
        return int(error.code)


def endpoints(server: LiteServer) -> list[tuple[str, str]]:
    return [(route.method, route.resource.canonical) for route in server.app().router.routes() if route.resource]


@pytest.mark.parametrize("headers", [{}, authorization("other"), {"Authorization": SECRET}])
def test_nothing_but_health_is_open(server: LiteServer, headers: dict[str, str]) -> None:
    every = [*endpoints(server), ("POST", "/no_such_endpoint")]
    assert len(every) > 15
    for method, path in every:
        expected = 200 if (method, path) == ("GET", "/health") else 401
        assert status(server, method, path, headers, b"{}" if method == "POST" else None) == expected, (method, path)


def test_the_secret_opens(server: LiteServer) -> None:
    body = json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}).encode()
    assert status(server, "POST", "/generate", authorization(SECRET), body) == 200
    assert status(server, "GET", "/server_info", authorization(SECRET)) == 200
    assert status(server, "POST", "/no_such_endpoint", authorization(SECRET), b"{}") == 404


def test_our_client_shows_the_secret_it_was_given(server: LiteServer) -> None:
    async def ask(secret: str | None) -> dict[str, object]:
        async with open_session(secret) as session:
            return await ServerConnection(session, server.address, deadline_in(30)).request("GET", "/server_info")

    assert asyncio.run(ask(SECRET))["running"] == 0
    for other in (None, "other"):
        with pytest.raises(StatusError, match=r"got status 401: .*must show the secret of the run"):
            asyncio.run(ask(other))


def test_a_server_for_others_needs_a_secret_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert main(["--model-path", "/no/such/model", "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "must have a secret: got --host 0.0.0.0 and none" in caplog.text
    assert "/no/such/model must" not in caplog.text

"""The registry of a run: real HTTP, and what it promises to servers that die, hang, come back or are replaced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from arealite.utils import registry as module
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.registry import (
    Claim,
    Registry,
    RegistryClient,
    RegistryError,
    RegistryRefusedError,
    ServerRecord,
    address_in,
)
from arealite.utils.secret import authorization

SECRET = "secret of the run"
SOON_S = 120.0
"""A moment, on a machine that is busy with other tests."""
NO_ADDRESSES = (
    "",
    "x",
    "a b:1",
    "h:0",
    "h:99999",
    "::1:80",
    "[::1",
    "http://h:1",
    "h:1/x",
    "u@h:1",
    "h:\uff11",
    "h:1\n",
    ":1",
)
RECORD = ServerRecord("10.0.0.1:80", "lite", "node1", 7, "ready", "", 12.5)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    one = Registry(SECRET)
    await one.start()
    yield one
    await one.close()


@pytest.fixture
def client(registry: Registry) -> RegistryClient:
    return RegistryClient(registry.address, SECRET)


def claim(
    record: ServerRecord = RECORD, owner: str = "a", number: int = 0, lease_s: float = 60.0, is_first: bool = True
) -> Claim:
    return Claim(record, owner, number, lease_s, is_first)


async def request(registry: Registry, method: str, path: str, **options: Any) -> tuple[int, str]:
    options = {"headers": authorization(SECRET)} | options
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{registry.address}{path}", **options) as reply,
    ):
        return reply.status, await reply.text()


async def test_a_server_registers_changes_and_withdraws(client: RegistryClient) -> None:
    assert (await client.watch(timeout_s=0)).servers == {}
    loading = replace(RECORD, state="loading", detail='Loading "é"\n50%')
    assert await client.claim("server-0", claim(loading))
    assert (await client.watch(timeout_s=0)).servers == {"server-0": loading}
    assert not await client.claim("server-0", claim(RECORD, number=1, is_first=False))
    assert (await client.watch(timeout_s=0)).servers == {"server-0": RECORD}
    await client.withdraw("server-0", "a", 2)
    assert (await client.watch(timeout_s=0)).servers == {}
    await client.withdraw("server-0", "a", 3)


async def test_a_watch_wakes_at_every_change_and_at_nothing_else(registry: Registry, client: RegistryClient) -> None:
    view = await client.watch(timeout_s=0)
    changes: list[tuple[str, list[str]]] = [("b", ["b"]), ("a", ["a", "b"]), ("b", ["a"]), ("a", [])]
    for number, (name, expected) in enumerate(changes):
        watching = asyncio.create_task(client.watch(view.moment))
        await asyncio.sleep(0.02 * (number % 2))  # change before and after it waits
        if name in expected:
            registry.claim(name, claim(owner=name, number=number))
        else:
            registry.withdraw(name, name, number)
        async with asyncio.timeout(SOON_S):
            view = await watching
        assert sorted(view.servers) == expected
    registry.claim("a", claim(number=9))
    view = await client.watch(timeout_s=0)
    registry.claim("a", claim(number=10))
    assert (await client.watch(view.moment, timeout_s=0.1)).moment == view.moment, "renewing a lease changes nothing"


async def test_no_change_is_lost_between_two_watches(registry: Registry, client: RegistryClient) -> None:
    """Whatever happens while nobody waits, the next watch returns at once with the last state."""
    view = await client.watch(timeout_s=0)
    for number in range(50):
        registry.claim("a", claim(replace(RECORD, pid=number), number=number))
        async with asyncio.timeout(SOON_S):
            view = await client.watch(view.moment, timeout_s=SOON_S)
        assert view.servers["a"].pid == number


async def test_many_watch_at_once(registry: Registry, client: RegistryClient) -> None:
    moment = (await client.watch(timeout_s=0)).moment
    watching = [asyncio.create_task(client.watch(moment)) for _ in range(20)]
    await asyncio.sleep(0.05)
    registry.claim("a", claim())
    async with asyncio.timeout(SOON_S):
        assert all(view.servers == {"a": RECORD} for view in await asyncio.gather(*watching))


async def test_an_entry_ends_with_its_lease(registry: Registry, client: RegistryClient) -> None:
    await client.claim("dead", claim(lease_s=0.2))
    await client.claim("alive", claim(owner="b", lease_s=60))
    view = await client.watch(timeout_s=0)
    async with asyncio.timeout(SOON_S):
        while "dead" in view.servers:
            view = await client.watch(view.moment)
    assert list(view.servers) == ["alive"]


async def test_a_renewal_ends_the_lease_before_it(client: RegistryClient) -> None:
    await client.claim("a", claim(lease_s=0.2))
    await client.claim("a", claim(number=1, lease_s=60, is_first=False))
    moment = (await client.watch(timeout_s=0)).moment
    assert (await client.watch(moment, timeout_s=0.6)).servers == {"a": RECORD}


async def test_a_server_that_stood_still_is_told_and_registers_again(client: RegistryClient) -> None:
    assert await client.claim("a", claim(lease_s=0.05))
    view = await client.watch(timeout_s=0)
    while view.servers:
        view = await client.watch(view.moment)
    assert await client.claim("a", claim(number=1, is_first=False)), "it was not registered any more"


async def test_a_name_that_another_server_took_is_left_to_it(client: RegistryClient) -> None:
    """A restarted server replaces the one before, which may live on behind a broken network."""
    await client.claim("a", claim(owner="old"))
    new = replace(RECORD, pid=8)
    assert await client.claim("a", claim(new, owner="new"))
    with pytest.raises(RegistryRefusedError, match="the server was removed or replaced"):
        await client.claim("a", claim(owner="old", number=1, is_first=False))
    with pytest.raises(RegistryRefusedError):
        await client.withdraw("a", "old", 2)
    assert (await client.watch(timeout_s=0)).servers == {"a": new}
    with pytest.raises(RegistryRefusedError, match="another server has registered under it"):
        await client.claim("a", claim(owner="third", is_first=False))
    await client.withdraw("a", "third", 1)
    assert (await client.watch(timeout_s=0)).servers == {"a": new}, "only the owner withdraws"


async def test_a_name_that_another_server_took_after_the_lease_is_left_to_it(client: RegistryClient) -> None:
    """The first claim of a server that then stood still may have been registered without its knowing."""
    await client.claim("a", claim(owner="old", lease_s=0.05))
    view = await client.watch(timeout_s=0)
    while view.servers:
        view = await client.watch(view.moment)
    await client.claim("a", claim(owner="new"))
    for is_first in (True, False):
        with pytest.raises(RegistryRefusedError, match="the server was removed or replaced"):
            await client.claim("a", claim(owner="old", number=1, is_first=is_first))
    await client.withdraw("a", "new", 1)
    with pytest.raises(RegistryRefusedError, match="the server was removed or replaced"):
        await client.claim("a", claim(owner="old", number=2, is_first=False))


async def test_what_the_launcher_removed_stays_away(registry: Registry, client: RegistryClient) -> None:
    """Also if its lease had ended before; its successor is welcome."""
    await client.claim("a", claim(owner="old"))
    registry.remove("a")
    assert registry.servers == {}
    with pytest.raises(RegistryRefusedError, match="the server was removed or replaced"):
        await client.claim("a", claim(owner="old", number=1))
    await client.claim("a", claim(owner="new", lease_s=0.05))
    view = await client.watch(timeout_s=0)
    while view.servers:
        view = await client.watch(view.moment)
    registry.remove("a")
    registry.remove("nobody")
    with pytest.raises(RegistryRefusedError):
        await client.claim("a", claim(owner="new", number=1))
    assert await client.claim("a", claim(owner="newest"))


async def test_a_message_that_arrives_late_changes_nothing(registry: Registry, client: RegistryClient) -> None:
    """A claim that a slow network delivers after the withdrawal, or one that is sent twice."""
    late = claim(number=4)
    await client.claim("a", claim(number=5))
    for message in (late, claim(number=5)):
        with pytest.raises(RegistryRefusedError, match=r"must come in order: got number [45], and 5 was the last one"):
            await client.claim("a", message)
    await client.withdraw("a", "a", 6)
    with pytest.raises(RegistryRefusedError):
        await client.claim("a", late)
    assert registry.servers == {}


async def test_nobody_without_the_secret(registry: Registry) -> None:
    for secret in (None, "", "other"):
        stranger = RegistryClient(registry.address, secret)
        with pytest.raises(RegistryRefusedError, match="GET /servers must show the secret of the run"):
            await stranger.watch(timeout_s=0)
        with pytest.raises(RegistryRefusedError, match="PUT /servers/a must show the secret of the run"):
            await stranger.claim("a", claim())
        for method, path in [("GET", "/"), ("GET", "/health"), ("DELETE", "/servers/a"), ("OPTIONS", "/servers")]:
            assert (await request(registry, method, path, headers=authorization(secret)))[0] == 401
    assert registry.servers == {}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"no json", 400),
        (b"[1]", 400),
        (b"\xff\x00", 400),
        (b" " * 20_000, 413),
        (json.dumps(asdict(claim()) | {"lease_s": float("nan")}).encode(), 400),
        (json.dumps(asdict(claim()) | {"lease_s": 1e9}).encode(), 400),
        (json.dumps(asdict(claim()) | {"lease_s": 0}).encode(), 400),
        (json.dumps(asdict(claim()) | {"number": -1}).encode(), 400),
        (json.dumps(asdict(claim()) | {"record": {}}).encode(), 400),
        (json.dumps(asdict(claim()) | {"record": asdict(RECORD) | {"state": "dead"}}).encode(), 400),
        *(
            (json.dumps(asdict(claim()) | {"record": asdict(RECORD) | change}).encode(), 400)
            for change in (
                *({"address": one} for one in (7, *NO_ADDRESSES)),
                *({"since": one} for one in (float("nan"), float("inf"))),
                {"pid": -1},
            )
        ),
        (b"[" * 15_000, 400),
        (b'{"a":' * 3000, 400),
        (b'{"record": {"address": "\\ud800:1"}}', 400),
        (json.dumps(asdict(claim())).encode("utf-16"), 400),
    ],
)
async def test_garbage_is_refused(registry: Registry, body: bytes, status: int) -> None:
    assert (await request(registry, "PUT", "/servers/a", data=body))[0] == status
    assert registry.servers == {}


async def test_a_body_that_is_not_encoded_as_it_says_is_refused(registry: Registry) -> None:
    headers = authorization(SECRET) | {"Content-Encoding": "gzip"}
    assert (await request(registry, "PUT", "/servers/a", data=b"{}", headers=headers))[0] == 400


async def test_a_number_may_be_of_any_size(registry: Registry) -> None:
    """What comes after one that is no float is refused, not a crash."""
    for number, status in ((10**400, 200), (7, 409)):
        body = json.dumps(asdict(claim(number=number))).encode()
        assert (await request(registry, "PUT", "/servers/a", data=body))[0] == status
    assert (await request(registry, "DELETE", "/servers/a?owner=a&number=8"))[0] == 409
    assert (await request(registry, "DELETE", f"/servers/a?owner=a&number={'9' * 5000}"))[0] == 400


@pytest.mark.parametrize("method", ["POST", "PATCH", "TRACE", "OPTIONS", "FOO"])
async def test_other_methods_are_refused(registry: Registry, method: str) -> None:
    for path in ("/servers", "/servers/a"):
        assert (await request(registry, method, path))[0] in (400, 405)


async def test_it_listens_on_ipv6() -> None:
    one = Registry(SECRET)
    await one.start("::1")
    client = RegistryClient(one.address, SECRET)
    record = replace(RECORD, address="[::1]:80")
    assert one.address.startswith("[::1]:") and await client.claim("a", claim(record))
    assert (await client.watch(timeout_s=0)).servers == {"a": record}
    await one.close()


async def test_wrong_paths_and_queries_are_refused(registry: Registry) -> None:
    body = json.dumps(asdict(claim())).encode()
    for path in (
        "/servers",
        "/servers/",
        "/servers/a/b",
        "/servers/%2E%2E%2Fa",
        "/servers/a%0Ab",
        "/servers/" + "a" * 300,
    ):
        assert (await request(registry, "PUT", path, data=body))[0] in (404, 405), path
    for query in ("wait_s=x", "wait_s=-1", "wait_s=nan"):
        assert (await request(registry, "GET", f"/servers?{query}"))[0] == 400, query
    assert (await request(registry, "DELETE", "/servers/a?number=x"))[0] == 400
    assert (await request(registry, "GET", "/servers?after=of+another+registry&wait_s=inf"))[0] == 200


async def test_a_cut_connection_frees_its_watch(registry: Registry, client: RegistryClient) -> None:
    moment = (await client.watch(timeout_s=0)).moment
    watching = asyncio.create_task(client.watch(moment))
    async with asyncio.timeout(SOON_S):
        while not registry._changed._waiters:
            await asyncio.sleep(0.01)
        watching.cancel()
        while registry._changed._waiters:
            await asyncio.sleep(0.01)


async def test_a_registry_that_is_absent_mute_or_gone_is_named(
    registry: Registry, client: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = asyncio.create_task(client.watch((await client.watch(timeout_s=0)).moment))
    await asyncio.sleep(0.05)
    monkeypatch.setattr(module, "DEADLINE_S", 0.3)
    with hold_port() as absent:
        address = f"{LOOPBACK}:{port_of(absent)}"
        with pytest.raises(RegistryError, match=f"registry of the run at {address} must answer within"):
            await RegistryClient(address, SECRET).watch(timeout_s=0)
        absent.listen()  # and never answers
        with pytest.raises(RegistryError, match=r"must answer within 0\.3 s: got TimeoutError"):
            await RegistryClient(address, SECRET).watch(timeout_s=0)
    await registry.close()
    await watching
    with pytest.raises(RegistryError, match="must answer within"):
        await client.watch(timeout_s=0)


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", "<p>hi"),
        *(("application/json", body) for body in ("{}", "[1]", "7", "null")),
        pytest.param("application/json", "[" * 100_000, id="deep"),
    ],
)
async def test_another_program_at_the_address_is_no_registry(kind: str, body: str, status: int) -> None:
    """A registry that was killed leaves its registry.json, and its port may be someone else's by now."""

    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nContent-Type: {kind}\r\n\r\n"
        writer.write(f"{head}{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(page, LOOPBACK, 0) as server:
        address = f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        client = RegistryClient(address, SECRET)
        for request in (client.watch(timeout_s=0), client.claim("a", claim())):
            with pytest.raises(RegistryError, match=f"at {address} must answer") as caught:
                await request
            assert not isinstance(caught.value, RegistryRefusedError)


async def test_a_client_follows_the_run_folder_to_the_next_registry(tmp_path: Path) -> None:
    """A run that was requeued listens elsewhere; what the first one leaves at its end is the file of the second."""
    client = RegistryClient(tmp_path / "registry.json", SECRET)
    with pytest.raises(
        RegistryError, match=r"registry\.json must say where the registry of the run is: got FileNotFound"
    ):
        await client.watch(timeout_s=0)
    first, second = Registry(SECRET), Registry(SECRET)
    await first.start(file=tmp_path / "registry.json")
    assert await client.claim("a", claim())
    moment = (await client.watch(timeout_s=0)).moment
    await second.start(file=tmp_path / "registry.json")
    await first.close()
    view = await client.watch(moment)
    assert (view.servers, view.moment != moment) == ({}, True), "at once, because it is another registry"
    assert await client.claim("a", claim(number=1, is_first=False))
    await second.close()
    assert list(tmp_path.iterdir()) == []


async def test_where_it_listens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have a secret: got --host 0\.0\.0\.0 and none"):
        await Registry(None).start("0.0.0.0")
    one = Registry(None)
    await one.start(file=tmp_path / "registry.json")
    assert one.address.startswith(LOOPBACK)
    assert address_in(str(tmp_path / "registry.json"))[0] == one.address
    assert (await RegistryClient(one.address, None).watch(timeout_s=0)).servers == {}
    await one.close()
    for bad in ("", "{}", "[]", '{"address": 1'):
        (tmp_path / "registry.json").write_text(bad)
        with pytest.raises(RegistryError, match="must say where the registry of the run is"):
            address_in(str(tmp_path / "registry.json"))

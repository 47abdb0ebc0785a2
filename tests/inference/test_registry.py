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
from testing_raw import answering, json_reply

from arealite.inference import registry as module
from arealite.inference.registry import (
    Registry,
    RegistryClient,
    RegistryError,
    RegistryRefusedError,
    RemovedError,
    ServerEntry,
    address_in,
)
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.secret import authorization

SECRET = "secret of the run"
SOON_S = 120.0
"""A moment, on a machine that is busy with other tests."""
NO_ADDRESSES = ("", "h:0", "h:99999", "::1:80", "http://h:1", "h:1/x", "u@h:1", "h:\uff11", "h:1\n", ":1")
ENTRY = ServerEntry("server-0", "10.0.0.1:80", "lite", "first")
OTHER = replace(ENTRY, name="server-1", address="10.0.0.2:80", incarnation="other")


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    one = Registry(SECRET)
    await one.start()
    yield one
    await one.close()


@pytest.fixture
def client(registry: Registry) -> RegistryClient:
    return RegistryClient(registry.address, SECRET)


async def request(registry: Registry, method: str, path: str, **options: Any) -> tuple[int, str]:
    options = {"headers": authorization(SECRET)} | options
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{registry.address}{path}", **options) as reply,
    ):
        return reply.status, await reply.text()


async def test_a_server_registers_changes_and_leaves(client: RegistryClient) -> None:
    assert (await client.watch(timeout_s=0)).servers == {}
    before = replace(ENTRY, name="before")
    await client.put(before)
    assert (await client.watch(timeout_s=0)).servers == {"first": before}
    await client.put(ENTRY)
    assert (await client.watch(timeout_s=0)).servers == {"first": ENTRY}
    await client.remove("first")
    await client.remove("first")
    assert (await client.watch(timeout_s=0)).servers == {}


async def test_a_watch_wakes_at_every_change_and_at_nothing_else(registry: Registry, client: RegistryClient) -> None:
    view = await client.watch(timeout_s=0)
    for number, expected in enumerate((["first"], ["first", "other"], ["other"], [])):
        watching = asyncio.create_task(client.watch(view.moment))
        await asyncio.sleep(0.02 * (number % 2))  # change before and after it waits
        await (registry.put([ENTRY, OTHER][number]) if number < 2 else registry.remove(["first", "other"][number - 2]))
        async with asyncio.timeout(SOON_S):
            view = await watching
        assert sorted(view.servers) == expected
    await registry.put(third := replace(ENTRY, incarnation="third"))
    view = await client.watch(timeout_s=0)
    await registry.put(third)
    assert (await client.watch(view.moment, timeout_s=0.1)).moment == view.moment, "the same entry changes nothing"


async def test_no_change_is_lost_between_two_watches(registry: Registry, client: RegistryClient) -> None:
    """Whatever happens while nobody waits, the next watch returns at once with the last state."""
    view = await client.watch(timeout_s=0)
    for number in range(50):
        await registry.put(replace(ENTRY, name=f"{number}"))
        async with asyncio.timeout(SOON_S):
            view = await client.watch(view.moment, timeout_s=SOON_S)
        assert view.servers["first"].name == f"{number}"


async def test_an_incarnation_that_was_removed_stays_away(registry: Registry, client: RegistryClient) -> None:
    """Also one whose first message arrives late, or whose address another one took; its successor is welcome."""
    await client.put(ENTRY)
    await client.put(second := replace(ENTRY, name="anew", incarnation="second"))
    assert registry.servers == {"second": second}
    await client.remove("late")
    for incarnation in ("first", "late"):
        with pytest.raises(RemovedError, match="this incarnation of it was removed"):
            await client.put(replace(ENTRY, incarnation=incarnation))
    registry.remove_named("anew")
    registry.remove_named("nobody")
    assert registry.servers == {}
    await client.put(replace(second, incarnation="third"))
    assert list(registry.servers) == ["third"]


async def test_nobody_without_the_secret(registry: Registry) -> None:
    for secret in (None, "", "other"):
        stranger = RegistryClient(registry.address, secret)
        with pytest.raises(RegistryRefusedError, match="GET /servers must show the secret of the run"):
            await stranger.watch(timeout_s=0)
        with pytest.raises(RegistryRefusedError, match="POST /servers must show the secret of the run"):
            await stranger.put(ENTRY)
        for method, path in [("GET", "/"), ("GET", "/health"), ("DELETE", "/servers"), ("OPTIONS", "/servers")]:
            assert (await request(registry, method, path, headers=authorization(secret)))[0] == 401
    assert registry.servers == {}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *((body, 400) for body in (b"", b"no json", b"[1]", b"\xff\x00", b"[" * 15_000, b'{"a":' * 3000)),
        (b" " * 20_000, 413),
        *(
            (json.dumps(asdict(ENTRY) | change).encode(), 400)
            for change in (
                *({"address": one} for one in (7, *NO_ADDRESSES)),
                *({"name": one} for one in ("", "a/b", "../a", "a\nb", "a\n", "a" * 300)),
                {"incarnation": ""},
            )
        ),
        (b'{"address": "\\ud800:1"}', 400),
        (json.dumps(asdict(ENTRY)).encode("utf-16"), 400),
    ],
)
async def test_garbage_is_refused(registry: Registry, body: bytes, status: int) -> None:
    assert (await request(registry, "POST", "/servers", data=body))[0] == status
    assert registry.servers == {}


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


@pytest.mark.parametrize("status", ["200 OK", "404 X"])
@pytest.mark.parametrize("body", [b"<p>hi", b"{}", b"[1]", b"null", pytest.param(b"[" * 100_000, id="deep")])
async def test_another_program_at_the_address_is_no_registry(body: bytes, status: str) -> None:
    """A registry that was killed leaves its registry.json, and its port may be someone else's by now."""
    kind = "text/html" if body.startswith(b"<") else "application/json"
    with answering(json_reply(body, status=status, type=kind)) as address:
        client = RegistryClient(address, SECRET)
        for request in (client.watch(timeout_s=0), client.put(ENTRY)):
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
    await client.put(ENTRY)
    moment = (await client.watch(timeout_s=0)).moment
    await second.start(file=tmp_path / "registry.json")
    await first.close()
    view = await client.watch(moment)
    assert (view.servers, view.moment != moment) == ({}, True), "at once, because it is another registry"
    await client.put(ENTRY)
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

"""One contract for all backends, on real servers.

AREALITE_REQUIRE_NAMES=1 (`make test-names`) adds Redis, etcd and Ray, which take a minute, and lets nothing be skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from arealite.utils.name_resolve import (
    NameBackendError,
    NameEntryExistsError,
    NameEntryNotFoundError,
    NameRepository,
    make_repository,
)
from arealite.utils.network import free_port

TTL_S = 2.0
"""The shortest lease of etcd."""
START_S = 60.0
SOON_S = 15.0
"""A second, on a machine that is busy with other tests."""
IS_REQUIRED = os.environ.get("AREALITE_REQUIRE_NAMES") == "1"
ALL_KINDS = ["nfs", "redis", "etcd3", "ray"]
in_group = {kind: pytest.mark.xdist_group(f"names-{kind}") for kind in ALL_KINDS}
"""Each has servers of its own, so that four workers test all at once."""
needs_servers = pytest.mark.skipif(not IS_REQUIRED, reason="`make test-names` runs this with real servers")
on = {kind: [in_group[kind], *([] if kind == "nfs" else [needs_servers])] for kind in ALL_KINDS}


def eventually(check: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Wait until something holds, and return how long that took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < within_s, f"{what}: not after {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - began


def missing(what: str) -> None:
    """Skip a test, or fail where nothing may be skipped."""
    (pytest.fail if IS_REQUIRED else pytest.skip)(f"{what} is not installed")


class Server:
    """A real Redis or etcd."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program = shutil.which(program) or missing(program)
        self.port, self.peer_port = free_port(), free_port()
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder.with_suffix(".log")).open("ab") as log:
            self.process = subprocess.Popen([str(self.program), *self.flags()], stdout=log, stderr=log)

    def flags(self) -> list[str]:
        if "redis" in str(self.program):
            only_here = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
            return ["--port", str(self.port), *only_here]
        url, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        own = ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers]
        cluster = ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"e0={peers}"]
        return ["--name", "e0", "--data-dir", str(self.folder), *own, *cluster]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class Backend:
    """One type of name resolve; `restart` loses what it kept."""

    def __init__(self, arguments: dict[str, str], env: dict[str, str] | None = None) -> None:
        self.arguments = arguments
        self.env = os.environ | (env or {})
        self.restart: Callable[[], None] | None = None
        self.opened: list[NameRepository] = []

    def open(self) -> NameRepository:
        """Return a repository of its own, as another process would have it."""
        self.opened.append(make_repository(**self.arguments))
        return self.opened[-1]

    def spawn(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """Run code with `names` in another process; its output is read line by line."""
        opening = (
            "import json, sys, time\nfrom arealite.utils.name_resolve import *\n"
            "names = make_repository(**json.loads(sys.argv[1]))\n"
        )
        command = [sys.executable, "-c", opening + code, json.dumps(self.arguments), *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.env)


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Backend]]:
    """Start the server of a type when it is first asked for."""
    folder = tmp_path_factory.mktemp("names")
    started: dict[str, Backend] = {}
    with contextlib.ExitStack() as stack:

        def backend(kind: str) -> Backend:
            if kind not in started:
                started[kind] = make(kind)
            return started[kind]

        def make(kind: str) -> Backend:
            if kind == "nfs":
                return Backend({"type": kind, "nfs_record_root": str(folder)})
            if kind == "ray":
                made = Backend({"type": kind, "ray_actor_name": "names"}, {"RAY_ADDRESS": stack.enter_context(ray())})
                made.open().add("kept", "lest the actor ends after each test", delete_on_exit=False)
                return made
            server = Server({"redis": "redis-server", "etcd3": "etcd"}[kind], folder / kind)
            stack.callback(server.kill)
            made = Backend({"type": kind, f"{kind}_addr": f"127.0.0.1:{server.port}"})
            wait_until_up(made)

            def restart() -> None:
                server.kill()
                shutil.rmtree(server.folder)
                time.sleep(1.5 * TTL_S)  # longer than a lease: its owner is to notice
                server.start()

            made.restart = restart
            return made

        yield backend


def wait_until_up(backend: Backend) -> None:
    def is_up() -> bool:
        with contextlib.suppress(NameBackendError):
            return backend.open().items("run") == {}
        return False

    eventually(is_up, within_s=START_S, what="the server answers")


@contextlib.contextmanager
def ray() -> Iterator[str]:
    """Start a cluster of this machine, and yield its address."""
    if importlib.util.find_spec("ray") is None:
        missing("ray")
    import ray

    context = ray.init(
        "local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(params=[pytest.param(kind, marks=on[kind]) for kind in ALL_KINDS])
def backend(request: pytest.FixtureRequest, backends: Callable[[str], Backend]) -> Iterator[Backend]:
    made = backends(request.param)
    yield made
    for names in made.opened:
        names.reset()
    made.open().clear_subtree("run")
    made.opened.clear()


@pytest.fixture
def names(backend: Backend) -> NameRepository:
    return backend.open()


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Leave no process behind."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


HOLD = f"""
told = lambda reason: print("lapsed:", reason, flush=True)
names.add("run/servers/a", "x", keepalive_ttl={TTL_S}, on_lost=told)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(backend: Backend) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps a lease."""
    with ended(backend.spawn(HOLD)) as process:
        assert line_of(process) == "held"
        yield process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_name_has_one_value_until_it_is_replaced_or_deleted(backend: Backend, names: NameRepository) -> None:
    other = backend.open()
    names.add("run/a", "1")
    assert other.get("run/a") == "1"
    with pytest.raises(NameEntryExistsError, match=r"^run/a must be added once: got a second value, .* pass replace"):
        other.add("run/a", "2")
    assert names.get("run/a") == "1"
    other.add("run/a", "2", replace=True)
    assert names.get("run/a") == "2"
    names.delete("run/a")
    with pytest.raises(NameEntryNotFoundError, match=r"^run/a must be in .*name_resolve"):
        other.get("run/a")
    with pytest.raises(NameEntryNotFoundError):
        other.delete("run/a")
    other.add("run/a", "3")
    assert names.get("run/a") == "3"


def test_a_subtree_is_a_name_and_what_is_below_it(names: NameRepository) -> None:
    inside = {"run/s": "0", "run/s/b": "1", "run/s/a/deep": "2", "run/s/[x]*?": "3", "run/s/é:%2F, ~ {}": "4\n5\n"}
    outside = ["run/s0", "run/s-1", "run/s!", "run/sub/a", "run/S/b", "run/x/s/b", "run/[s]/b", "run/?/b", "run/*"]
    for name, value in (inside | dict.fromkeys(outside, "-")).items():
        names.add(name, value)
    assert names.items("/run//s/") == dict(sorted(inside.items()))
    assert names.find_subtree("run/s") == sorted(inside)
    assert names.get_subtree("run/s") == [inside[name] for name in sorted(inside)]
    for odd in ("run/[s]", "run/?", "run/*"):
        assert len(names.items(odd)) == 1
    names.clear_subtree("run/s")
    assert names.items("run/s") == {}
    assert names.find_subtree("run") == sorted(outside)
    names.clear_subtree("run/nothing")


def test_subentries_have_names_of_their_own(names: NameRepository) -> None:
    keys = {names.add_subentry("run/servers", value) for value in "xyx"}
    assert len(keys) == 3
    assert all(key.rpartition("/")[0] == "run/servers" and len(key.rpartition("/")[2]) == 8 for key in keys)
    assert sorted(names.get_subtree("run/servers")) == ["x", "x", "y"]


def test_reset_deletes_what_is_still_ours(backend: Backend, names: NameRepository) -> None:
    other = backend.open()
    names.add("run/a", "1")
    names.add("run/b", "1", keepalive_ttl=60)
    names.add("run/stays", "1", delete_on_exit=False)
    names.add("run/replaced", "1")
    other.add("run/replaced", "2", replace=True)
    names.reset()
    assert other.items("run") == {"run/replaced": "2", "run/stays": "1"}
    names.add("run/a", "again")
    assert other.get("run/a") == "again"


def test_a_process_that_ends_takes_its_names_along(backend: Backend, names: NameRepository) -> None:
    code = 'names.add("run/a", "1"); names.add("run/b", "2", keepalive_ttl=60)\n'
    code += 'names.add("run/c", "3", delete_on_exit=False)'
    with ended(backend.spawn(code)) as process:
        assert process.wait(START_S) == 0
    assert names.items("run") == {"run/c": "3"}


def test_keepalive_outlasts_the_ttl_and_sigkill_ends_it_within_one(backend: Backend, names: NameRepository) -> None:
    with holder(backend) as process:
        until = time.monotonic() + 1.5 * TTL_S
        while time.monotonic() < until:
            assert names.get("run/servers/a") == "x"
            time.sleep(0.1)
        process.kill()
        eventually(lambda: names.items("run") == {}, within_s=TTL_S + 1, what="the entry of a killed process is gone")
    names.add("run/servers/a", "next")


def test_a_process_that_stood_still_learns_it_and_takes_its_name_again(backend: Backend, names: NameRepository) -> None:
    with holder(backend) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: names.items("run") == {}, within_s=SOON_S, what="the lease of a stopped process ends")
        process.send_signal(signal.SIGCONT)
        eventually(lambda: names.items("run") == {"run/servers/a": "x"}, within_s=SOON_S, what="it is taken again")
        assert line_of(process) == "lapsed: it was gone, and is taken again"


def test_a_lease_that_somebody_else_took_is_left_to_him(backend: Backend, names: NameRepository) -> None:
    with holder(backend) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: names.items("run") == {}, within_s=SOON_S, what="the lease of a stopped process ends")
        names.add("run/servers/a", "mine")
        process.send_signal(signal.SIGCONT)
        assert line_of(process) == "lapsed: somebody else has the name"
        time.sleep(TTL_S)
        assert names.get("run/servers/a") == "mine"
        names.delete("run/servers/a")
        eventually(lambda: names.items("run") == {"run/servers/a": "x"}, within_s=SOON_S, what="it is free again")


def test_replacing_our_own_entry_moves_its_lease(backend: Backend, names: NameRepository) -> None:
    lapses: list[str] = []
    watching = backend.open()
    names.add("run/b", "leased", keepalive_ttl=TTL_S)
    names.add("run/b", "for good", replace=True, delete_on_exit=False)
    until, count = time.monotonic() + TTL_S, 0
    while time.monotonic() < until:
        count += 1
        names.add("run/a", str(count), keepalive_ttl=TTL_S, replace=True, on_lost=lapses.append)
        assert watching.get("run/a") == str(count)
    time.sleep(1.25 * TTL_S)
    assert (watching.items("run"), lapses) == ({"run/a": str(count), "run/b": "for good"}, [])


RACE = """
print("here", flush=True)
sys.stdin.readline()
won = []
for i in range(40):
    try:
        names.add(f"run/race/{i}", sys.argv[2], delete_on_exit=False)
        won.append(f"run/race/{i}")
    except NameEntryExistsError:
        pass
print(json.dumps(won), flush=True)
"""


def test_of_racing_processes_exactly_one_adds_a_name(backend: Backend, names: NameRepository) -> None:
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(ended(backend.spawn(RACE, str(rank)))) for rank in range(3)]
        assert [line_of(racer) for racer in racers] == ["here"] * 3
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        claims = {name: str(rank) for rank, racer in enumerate(racers) for name in json.loads(line_of(racer))}
        assert [racer.wait(START_S) for racer in racers] == [0] * 3
    assert names.items("run/race") == dict(sorted(claims.items()))
    assert len(claims) == 40


def test_wait_returns_a_value_soon_after_it_is_added(backend: Backend, names: NameRepository) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(backend.open().wait, "run/late", timeout=START_S, poll_frequency=0.05)
        time.sleep(0.3)
        assert not waiting.done()
        names.add("run/late", "here")
        assert waiting.result(timeout=2) == "here"


def test_waits_deadline_names_the_key_and_the_backend(names: NameRepository) -> None:
    assert names.items("run") == {}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"run/never must be added within 0\.3 s: got none\. .*name_resolve"):
        names.wait("run/never", timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_a_watch_sees_servers_join_and_leave(backend: Backend, names: NameRepository) -> None:
    seen: list[dict[str, str]] = []

    def watch() -> None:
        for now in backend.open().watch("run/servers", timeout=START_S, poll_frequency=0.1):
            seen.append(now)
            if len(seen) == 4:
                return

    def sees(*last: str) -> None:
        eventually(
            lambda: bool(seen) and list(seen[-1].values()) == list(last), within_s=SOON_S, what=f"{last} is seen"
        )

    thread = threading.Thread(target=watch)
    thread.start()
    sees()
    names.add("run/servers/a", "1")
    sees("1")
    names.add("run/servers/b", "2")
    sees("1", "2")
    names.delete("run/servers/a")
    sees("2")
    thread.join(START_S)
    began = time.monotonic()
    assert list(names.watch("run/servers", timeout=0.5)) == [{"run/servers/b": "2"}]
    assert 0.5 <= time.monotonic() - began < 5


@pytest.mark.parametrize("backend", [pytest.param(kind, marks=on[kind]) for kind in ("redis", "etcd3")], indirect=True)
def test_an_empty_restart_is_told_and_the_lease_comes_back(backend: Backend, names: NameRepository) -> None:
    assert backend.restart is not None
    lapses: list[str] = []
    names.add("run/servers/a", "x", keepalive_ttl=TTL_S, on_lost=lapses.append)
    names.add("run/no-lease", "y")
    watching = backend.open().watch("run", timeout=30, poll_frequency=0.1)
    assert len(next(watching)) == 2
    backend.restart()
    assert next(now for now in watching if now) == {"run/servers/a": "x"}
    assert len(lapses) == 1 and "must answer within 10 s: got " in lapses[0]
    time.sleep(1.5 * TTL_S)
    assert backend.open().items("run") == {"run/servers/a": "x"}
    assert len(lapses) == 1, "it holds again"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        pytest.param("redis", "redis_addr", marks=on["redis"]),
        pytest.param("etcd3", "etcd3_addr", marks=on["etcd3"]),
    ],
)
def test_a_backend_that_is_not_there_or_mute_is_named(kind: str, key: str) -> None:
    def ask(address: str) -> tuple[str, float]:
        arguments: dict[str, Any] = {"type": kind, key: address}
        began = time.monotonic()
        with pytest.raises(NameBackendError) as raised:
            make_repository(**arguments).get("run/a")
        return str(raised.value), time.monotonic() - began

    absent = f"127.0.0.1:{free_port()}"
    text, took_s = ask(absent)
    assert f"{absent} (cluster.name_resolve.{key}) must answer within 10 s: got " in text and took_s < 5
    with socket.create_server(("127.0.0.1", 0)) as mute:
        text, took_s = ask(f"127.0.0.1:{mute.getsockname()[1]}")
        assert "must answer within 10 s: got " in text and took_s < 11


@in_group["etcd3"]
@needs_servers
def test_etcd_keeps_leases_over_a_restart(tmp_path: Path) -> None:
    server = Server("etcd", tmp_path / "etcd")
    try:
        backend = Backend({"type": "etcd3", "etcd3_addr": f"127.0.0.1:{server.port}"})
        wait_until_up(backend)
        lapses: list[str] = []
        names = backend.open()
        names.add("run/a", "x", keepalive_ttl=30, on_lost=lapses.append)
        server.kill()
        server.start()
        wait_for_answer = backend.open().watch("run", timeout=START_S, poll_frequency=0.1)
        assert next(wait_for_answer) == {"run/a": "x"}
        names.reset()
        assert (backend.open().items("run"), lapses) == ({}, [])
    finally:
        server.kill()


@in_group["ray"]
@needs_servers
def test_rays_actor_outlives_its_creator_and_ends_with_its_last_name(backends: Callable[[str], Backend]) -> None:
    backend = backends("ray")
    import ray

    code = 'import signal\nsignal.signal(signal.SIGTERM, before := lambda *_: None)\nnames.items("run")\n'
    code += 'assert signal.getsignal(signal.SIGTERM) is before\nnames.add("run/a", "1", delete_on_exit=False)'
    with ended(backend.spawn(code)) as process:
        assert process.wait(START_S) == 0
    names = backend.open()
    assert names.items("run") == {"run/a": "1"}

    lapses: list[str] = []
    names.add("run/b", "2", keepalive_ttl=TTL_S, on_lost=lapses.append)
    ray.kill(ray.get_actor("names", namespace="arealite"), no_restart=False)  # as if its machine were lost
    assert next(now for now in names.watch("run", timeout=30) if now and "run/a" not in now) == {"run/b": "2"}
    assert lapses

    names.clear_subtree("run")
    names.clear_subtree("kept")
    eventually(lambda: ray.util.list_named_actors(True) == [], within_s=10, what="the actor has ended")
    assert names.items("run") == {}, "the next one starts as empty"


def test_names_types_and_addresses_are_checked(tmp_path: Path) -> None:
    names = make_repository("nfs", nfs_record_root=tmp_path)
    for wrong in ("", "/", ".", "..", "../x", "a\nb", "./.."):
        with pytest.raises(ValueError, match="a name must be words between slashes: got"):
            names.add(wrong, "x")
    with pytest.raises(ValueError, match="type must be nfs, redis, etcd3 or ray: got zookeeper"):
        make_repository("zookeeper")
    with pytest.raises(ValueError, match="must be host:port: got 'redis'"):
        make_repository("redis", redis_addr="redis")

"""The program that runs one server: real processes, real HTTP, a real registry."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout
from harness.wire import ask
from testing_ports import held_port
from testing_registry import RunningRegistry

from arealite.inference.registry import ServerEntry
from arealite.launcher.serve import serve as module
from arealite.launcher.serve.serve import REFUSED
from arealite.utils.network import LOOPBACK, hold_port, host_ip, port_of
from arealite.utils.processes import REGISTRY_VARIABLE, descendants, is_alive, kill_tree, send_signal, wait_gone
from arealite.utils.secret import authorization

REPOSITORY = Path(__file__).parents[3]
SECRET = "s3cret"
DEADLINE_S = 180.0


class Serve:
    """One run of the program."""

    def __init__(self, process: subprocess.Popen[str], registry: RunningRegistry) -> None:
        self.process = process
        self.registry = registry
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def entry(self) -> ServerEntry | None:
        return self.registry.servers.get("server-0")

    def wait_for_entry(self, wanted: Callable[[ServerEntry | None], bool]) -> ServerEntry | None:
        return self.registry.wait_for(lambda servers: wanted(servers.get("server-0")), DEADLINE_S).get("server-0")

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, "".join(self.lines))):
            assert time.monotonic() < deadline and self.process.poll() is None, self.lines
            time.sleep(0.02)
        return found

    def ready(self) -> str:
        """Return the address once it is ready."""
        return self.wait_for_line(r"server-0 is ready at (\S+) after")[1]

    def terminate(self) -> float:
        """Send SIGTERM, wait for the end with status 0, and return how long it took."""
        started = time.monotonic()
        self.process.terminate()
        assert self.end() == 0, self.lines
        return time.monotonic() - started

    def end(self) -> int:
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RunningRegistry]:
    one = RunningRegistry(SECRET, tmp_path / "registry.json")
    yield one
    one.close()


@pytest.fixture
def serve(registry: RunningRegistry) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*flags: str, backend: str = "sglang", command: list[str] | None = None, **env: str) -> Serve:
        command = command or [sys.executable, str(Path(__file__).parent / "stock_server.py")]
        serve = [sys.executable, "-m", "arealite.launcher.serve", "--backend", backend, "--name", "server-0"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "AREALITE_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        environment[REGISTRY_VARIABLE] = registry.address
        process = subprocess.Popen(
            [*serve, *flags, "--", *command],
            env=environment | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(Serve(process, registry))
        return started[-1]

    yield start
    for one in started:
        kill_tree(one.process.pid)


@pytest.fixture
def outside() -> str:
    """An address of this machine that others can reach."""
    address = host_ip()
    if address == LOOPBACK:
        pytest.skip("this machine has no address but loopback")
    return address


def stock(*behaviours: str) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / "stock_server.py"), *behaviours]


def post(address: str, endpoint: str, body: object, *, secret: str | None = SECRET) -> tuple[int, dict[str, Any]]:
    answer = ask(address, "POST", endpoint, body, timeout_s=DEADLINE_S, secret=secret)
    return answer.status, answer.body


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_stock_server_is_told_to_abort(serve: Callable[..., Serve], outside: str, backend: str) -> None:
    one = serve("--host", outside, backend=backend, command=stock("guarded"))
    address = one.ready()
    assert address == one.wait_for_line(r"listening on (\S+)")[1] and address.startswith(outside)
    for pid in [one.process.pid, *descendants(one.process.pid)]:
        assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text(), "a command line is seen by everybody"
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, address, "/generate", {})
        one.wait_for_line("holding")
        one.process.terminate()
        one.wait_for_entry(lambda entry: entry is None)
        assert one.process.poll() is None, "its entry is removed before it goes"
        assert one.end() == 0
        assert reply.result() == (200, {"finish": "abort", "tokens": [1, 2, 3]})
    assert one.entry is None


def test_a_failed_abort_is_reported_without_the_secret(serve: Callable[..., Serve]) -> None:
    one = serve(command=stock("guarded", "stumbles"))
    address = one.ready()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, address, "/generate", {})
        one.wait_for_line("holding")
        one.terminate()
        assert reply.result()[0] == 200
    output = "".join(one.lines)
    assert re.search(r"WARNING: /pause_generation\S* failed, requests in flight may be lost: .*500", output), output
    assert SECRET not in output


def test_a_server_that_lets_other_nodes_in_without_the_secret_is_never_ready(
    serve: Callable[..., Serve], outside: str
) -> None:
    one = serve("--host", outside)
    assert one.end() == REFUSED
    assert "must refuse requests without the secret: got status 404" in one.lines[-1]
    assert not any("is ready" in line for line in one.lines) and one.entry is None


async def test_a_server_that_is_busy_when_it_is_asked_for_the_secret_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", ClientTimeout(total=2.0))
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        asked.append(path)
        if asked.count(path) > 1 or path == "/health":
            status = "200 OK" if path == "/health" else "401 Unauthorized"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, LOOPBACK, 0) as server, asyncio.timeout(DEADLINE_S):
        await module._loaded(f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}", is_exposed=True)
    assert asked == ["/health", "/needs-the-secret", "/needs-the-secret"]


def test_a_client_that_stays_connected_does_not_hold_up_the_end(serve: Callable[..., Serve]) -> None:
    one = serve()
    address = one.ready()
    client = HTTPConnection(address, timeout=DEADLINE_S)
    client.request("POST", "/digest", b"", authorization(SECRET))
    assert client.getresponse().read()
    assert one.terminate() < 8
    client.close()


def test_a_second_signal_ends_a_server_that_does_not(serve: Callable[..., Serve]) -> None:
    one = serve(command=stock("deaf", "daemon"))
    address, daemon = one.ready(), int(one.wait_for_line(r"daemon (\d+)")[1])
    pids = [*descendants(one.process.pid), daemon]
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, address, "/generate", {})
        one.wait_for_line("holding")
        one.process.terminate()
        one.wait_for_entry(lambda entry: entry is None)
        assert one.process.poll() is None
        assert one.terminate() < 8, "without waiting for what is deaf"
        assert isinstance(reply.exception(), OSError)
    assert wait_gone(pids, timeout_s=120) == set()


def test_a_server_that_loads_has_no_entry_and_ends_at_once(serve: Callable[..., Serve]) -> None:
    one = serve(command=stock("hang"))
    one.wait_for_line("weights:  50%")
    assert one.entry is None
    assert one.terminate() < 8


def test_a_server_that_dies_tells_how(serve: Callable[..., Serve]) -> None:
    one = serve(command=stock("die"))
    assert one.end() == 17
    assert "".join(one.lines[-2:]) == (
        "OutOfMemoryError: no room for the model\nserve: server-0 ended with exit status 17 while it was loading\n"
    )
    assert one.entry is None


@pytest.mark.parametrize("victim", ["serve", "guard", "server"])
def test_nothing_survives_a_sigkill(serve: Callable[..., Serve], victim: str) -> None:
    one = serve(command=stock("daemon"))
    one.ready()
    daemon = int(one.wait_for_line(r"daemon (\d+)")[1])
    guard, server = descendants(one.process.pid)[:2]
    send_signal({"serve": one.process.pid, "guard": guard, "server": server}[victim], signal.SIGKILL)
    assert one.process.wait(DEADLINE_S) == (-9 if victim == "serve" else 128 + signal.SIGKILL)
    assert wait_gone([guard, server, daemon], timeout_s=120) == set()
    if victim != "serve":
        assert one.entry is None


def test_a_lost_entry_comes_back_also_in_the_next_registry(serve: Callable[..., Serve], tmp_path: Path) -> None:
    """A run that starts again has a registry at another address."""
    one = serve("--registry", str(tmp_path / "registry.json"))
    one.ready()
    first = one.wait_for_entry(lambda entry: entry is not None)
    assert first is not None
    one.registry.drop("server-0")  # as by a trainer to which it was dead
    second = one.wait_for_entry(lambda entry: entry is not None)
    assert second is not None and second == replace(first, incarnation=second.incarnation) != first
    one.wait_for_line("WARNING: server-0 was removed from its run; it registers again")
    one.registry.stop()
    one.wait_for_line("WARNING: server-0 can't be registered yet, trying again: .*registry.json must say where")
    one.registry.restart()
    assert one.wait_for_entry(lambda entry: entry is not None) == second


def test_a_server_may_start_before_the_registry_of_its_run(serve: Callable[..., Serve], tmp_path: Path) -> None:
    one = serve("--registry", str(tmp_path / "later" / "registry.json"))
    one.ready()
    one.wait_for_line("WARNING: server-0 can't be registered yet")
    (tmp_path / "later").mkdir()
    (tmp_path / "registry.json").rename(tmp_path / "later" / "registry.json")
    one.wait_for_entry(lambda entry: entry is not None)


def test_refusals_come_before_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outside: str
) -> None:
    monkeypatch.setattr(module.processes, "adopt_orphans", lambda: None)
    monkeypatch.setenv(REGISTRY_VARIABLE, f"{LOOPBACK}:1")
    with hold_port() as taken:
        taken.listen()
        port = str(port_of(taken))
        for secret, flags, message in (
            ("", ["--host", outside], "must have a secret: got --host"),
            ("", [], "AREALITE_SECRET must be the secret of the run: got nothing"),
            (SECRET, ["--port", port], f"must be a free address of this node: got {LOOPBACK}:{port}"),
            (SECRET, ["--host", "203.0.113.1"], "must be a free address of this node: got 203.0.113.1:0"),
            (SECRET, ["--host", "0.0.0.0"], "--host must be one address"),
        ):
            monkeypatch.setenv("AREALITE_SECRET", secret)
            assert module.main(["--backend", "sglang", "--name", "server-0", *flags, "--", "false"]) == REFUSED
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("arealite.api.errors.ConfigError: ") and message in line


def test_without_a_run_it_only_serves() -> None:
    port = held_port()
    command = [sys.executable, "-m", "arealite.launcher.serve", "--backend", "vllm", "--name", "mine"]
    command += ["--port", str(port), "--", *stock()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"AREALITE_SECRET": "", REGISTRY_VARIABLE: ""}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "is ready" in line:
            break
    assert post(f"{LOOPBACK}:{port}", "/digest", {}, secret=None)[0] == 200
    process.terminate()
    assert process.wait(DEADLINE_S) == 0 and not is_alive(process.pid)

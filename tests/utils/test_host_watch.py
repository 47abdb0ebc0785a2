"""A node is lost when it falls silent or its trainer ends without a goodbye. Silence itself: `make test-hosts`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import testing_forks
from torch.distributed import TCPStore

from arealite.utils import host_watch

TIMEOUT_S = 1.0
WORD = "0123456789abcdef" * 2
DEADLINE_S = 120.0


def watch(meet: Callable[[socket.socket], None]) -> subprocess.CompletedProcess[str]:
    """Let a process watch what `meet` makes of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        code = (
            "from arealite.utils.host_watch import _watch; "
            f"_watch('{endpoint}', '{WORD}', 'host2', {TIMEOUT_S}); print('over')"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
        listener.settimeout(300)
        meet(listener)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess([], process.returncode, out, err)


def test_after_a_goodbye_a_node_may_go():
    def meet(listener: socket.socket) -> None:
        link = listener.accept()[0]
        assert link.recv(100) == WORD.encode()
        host_watch._links.append(link)
        host_watch.say_goodbye()

    finished = watch(meet)
    assert (finished.returncode, finished.stdout.strip()) == (0, "over"), finished.stderr


@pytest.mark.parametrize("way", ["closed", "reset"])
def test_an_end_without_a_goodbye_ends_the_process(way: str):
    def meet(listener: socket.socket) -> None:
        link, _ = listener.accept()
        link.recv(100)
        if way == "reset":
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        link.close()

    finished = watch(meet)
    assert finished.returncode == 1
    assert f"the trainer on host2 (127.0.0.1) must not end before ours: its connection was {way}" in finished.stderr


def test_the_kernel_closes_a_watched_link_that_falls_silent():
    with socket.create_server(("127.0.0.1", 0)) as listener, host_watch._connect(listener.getsockname(), 10) as link:
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port on which this process, in a run of three nodes, accepts the other two."""
    monkeypatch.setattr(host_watch, "_links", [])
    monkeypatch.setattr(host_watch, "_WORD_S", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    accepting = threading.Thread(target=host_watch._accept, args=(listener, WORD.encode(), 2))
    accepting.start()
    yield port
    accepting.join(DEADLINE_S)
    assert not accepting.is_alive() and listener.fileno() == -1, "it ends when it has accepted all"
    host_watch.say_goodbye()


def connected(port: int, said: bytes = b"") -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    link.sendall(said)
    return link


def test_only_nodes_of_the_run_are_kept_and_the_port_is_closed_after_the_last(port: int) -> None:
    with contextlib.ExitStack() as links:
        silent = [links.enter_context(connected(port)) for _ in range(100)]
        wrong = links.enter_context(connected(port, b"f" * len(WORD)))
        half = links.enter_context(connected(port, WORD[:7].encode()))
        http = links.enter_context(connected(port, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100))
        first = links.enter_context(connected(port, WORD.encode()))
        for stranger in (*silent, wrong, half, http):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "it is closed"
        slow = links.enter_context(connected(port, WORD[:7].encode()))
        slow.sendall(WORD[7:].encode())
        deadline = time.monotonic() + DEADLINE_S
        while len(host_watch._links) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        host_watch.say_goodbye()
        assert first.recv(1) == slow.recv(1) == host_watch._GOODBYE
        with pytest.raises(ConnectionError):
            for _ in range(100):  # the last one closes the port, but may do so a moment later
                connected(port).close()
                time.sleep(0.1)


def node(pipe: Connection) -> None:
    """Watch the other node, tell when it has connected, and end as asked."""
    rank = int(os.environ["RANK"])
    os.environ |= {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, is_master=rank == 0)
    host_watch.watch_hosts(store, "127.0.0.1", DEADLINE_S)
    while not host_watch._links:
        time.sleep(0.01)
    pipe.send("connected")
    pipe.recv()
    host_watch.say_goodbye()


def test_nodes_tell_each_other_their_words() -> None:
    with testing_forks.two_ranks(node) as nodes:
        assert [one.receive() for one in nodes] == ["connected"] * 2
        for one in reversed(nodes):  # the first one keeps the store
            one.pipe.send("end")
            assert one.end() == 0

"""A node is lost when it falls silent or its trainer ends without a goodbye. Silence itself: `make test-hosts`."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from arealite.utils import host_watch

TIMEOUT_S = 1.0


def watch(meet: Callable[[socket.socket], None]) -> subprocess.CompletedProcess[str]:
    """Let a process watch what `meet` makes of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        code = (
            f"from arealite.utils.host_watch import _watch; _watch('{endpoint}', 'host2', {TIMEOUT_S}); print('over')"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
        listener.settimeout(60)
        meet(listener)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess([], process.returncode, out, err)


def test_after_a_goodbye_a_node_may_go():
    def meet(listener: socket.socket) -> None:
        host_watch._links.append(listener.accept()[0])
        host_watch.say_goodbye()

    finished = watch(meet)
    assert (finished.returncode, finished.stdout.strip()) == (0, "over"), finished.stderr


@pytest.mark.parametrize("way", ["closed", "reset"])
def test_an_end_without_a_goodbye_ends_the_process(way: str):
    def meet(listener: socket.socket) -> None:
        link, _ = listener.accept()
        if way == "reset":
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        link.close()

    finished = watch(meet)
    assert finished.returncode == 1
    assert f"the trainer on host2 (127.0.0.1) must not end before ours: its connection was {way}" in finished.stderr


def test_the_kernel_closes_a_watched_link_that_falls_silent():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        host_watch._let_kernel_probe(link, 10)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000

"""Servers that want to see the secret are asked with it."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arealite.utils.secret import is_authorized
from arealite.watchdog.evidence import collect


class Guarded(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if is_authorized(self.headers["Authorization"], "s3cret") else 401)
        self.end_headers()
        self.wfile.write(b'{"running": 1}')

    def log_message(self, *args: object) -> None:
        pass


def test_a_guarded_server_answers_the_stall_watch(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        addresses = {"server-0": f"127.0.0.1:{server.server_port}"}
        (known,) = collect(tmp_path, addresses, [], stalled_s=1.0, secret="s3cret").servers
        (unknown,) = collect(tmp_path, addresses, [], stalled_s=1.0).servers
        server.shutdown()
    assert known.answer == {"running": 1} and known.error == ""
    assert unknown.answer is None and "401" in unknown.error


@pytest.mark.parametrize(
    "words",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"running": 1}',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{",
        b"no HTTP\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n[1]",
    ],
)
def test_a_server_that_ends_within_its_answer_is_one_that_does_not_answer(tmp_path: Path, words: bytes) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (server,) = collect(tmp_path, {"server-0": address}, [], stalled_s=1.0).servers
    assert server.answer is None and server.error


def test_a_server_whose_answer_never_ends_is_one_that_does_not_answer(tmp_path: Path) -> None:
    """Each byte comes in time, and the next one is always to come."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
            while not is_over.wait(0.1):
                connection.sendall(b" ")

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        answering = pool.submit(answer)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        looking = pool.submit(collect, tmp_path, {"server-0": address}, [], stalled_s=1.0)
        try:
            (server,) = looking.result(60).servers
            assert not answering.done()
        finally:
            is_over.set()
    assert server.answer is None and server.error == "no whole answer within 3 s"

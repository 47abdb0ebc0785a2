"""Servers that want to see the secret are asked with it."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

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

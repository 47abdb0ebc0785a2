"""Plain HTTP to a server, as someone who is not our client speaks it."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from arealite.utils.secret import authorization
from harness.processes import Program, wait_until


@dataclass(frozen=True)
class Answer:
    """A status and the body: parsed if it is JSON, else its text."""

    status: int
    body: Any


def ask(
    address: str, method: str, endpoint: str, payload: Any = None, *, timeout_s: float = 60.0, secret: str | None = None
) -> Answer:
    """Send a request and return the answer, whatever its status; OSError if there is none."""
    data = None if payload is None else json.dumps(payload).encode()
    headers = authorization(secret) | ({} if data is None else {"Content-Type": "application/json"})
    request = urllib.request.Request(f"http://{address}{endpoint}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return Answer(reply.status, _parsed(reply.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, _parsed(error.read()))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def wait_ready(address: str, timeout_s: float, *programs: Program) -> None:
    """Wait until a server says that it is healthy; Broken if it does not, or if its program ends."""

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            return ask(address, "GET", "/health").status == 200
        return False

    wait_until(f"a server that is ready at {address}", is_ready, timeout_s, *programs)

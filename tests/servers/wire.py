"""Plain HTTP to a server, as someone who is not our client speaks it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A status and the body: parsed if it is JSON, else its text."""

    status: int
    body: Any


def ask(address: str, method: str, endpoint: str, payload: Any = None, *, timeout_s: float = 60.0) -> Answer:
    """Send a request and return the answer, whatever its status; OSError if there is none."""
    data = None if payload is None else json.dumps(payload).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
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

"""Inference servers that the run did not start, each behind a flaky proxy.

One that was killed comes back by itself; all of them must be in order when the run has ended.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.utils.network import LOOPBACK, hold_port, port_of
from chaos.experiment import REPOSITORY, environment

_READY_S = 300.0
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Member:
    """A server and the proxy before it."""

    server: str
    proxy: str
    faults: Path

    def complaint(self) -> str | None:
        """Say what is wrong with the server itself."""
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        try:
            _wait_ready(self.server)
            answer = _ask(self.server, "/generate", json.dumps(body).encode())
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return None if len(answer["output_ids"]) == 4 else f"it samples nothing: {answer}"


@dataclass(frozen=True)
class Fleet:
    """The servers of one run."""

    members: tuple[Member, ...]

    @property
    def proxies(self) -> tuple[str, ...]:
        return tuple(member.proxy for member in self.members)

    def faults(self) -> Counter[str]:
        """Count what the proxies did."""
        paths = [member.faults for member in self.members if member.faults.exists()]
        return Counter(json.loads(line)["fault"] for path in paths for line in path.read_text().splitlines())

    def complaints(self) -> list[str]:
        """Say which servers are not as they were."""
        found = {member.server: member.complaint() for member in self.members}
        return [f"server {address} must be left in order: {text}" for address, text in found.items() if text]


@contextlib.contextmanager
def fleet(folder: Path, model: Path, *, size: int, seed: int, refuses: bool = True) -> Iterator[Fleet]:
    """Start servers and proxies, and end them; `seed` decides what proxies do, and one of them `refuses` weights."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        members = []
        for index in range(size):
            ports = [port_of(stack.enter_context(hold_port())) for _ in range(2)]
            server, proxy = (f"{LOOPBACK}:{port}" for port in ports)
            faults = folder / f"faults-{index}.jsonl"
            refused = random.Random(f"{seed} refuses").randint(10, 60) if refuses and index == 0 else -1
            served = ["--model-path", str(model), "--port", str(ports[0]), "--context", "512", "--seed", str(index)]
            respawned = [sys.executable, "-m", "arealite.server", *served]
            _guard(stack, folder / f"server-{index}.txt", "chaos.respawn", *respawned)
            passed = ["--server", server, "--port", str(ports[1]), "--faults", str(faults), "--refused", str(refused)]
            _guard(stack, folder / f"proxy-{index}.txt", "chaos.flaky_proxy", *passed, "--seed", f"{seed}{index}")
            members.append(Member(server, proxy, faults))
        for member in members:
            _wait_ready(member.proxy)
        yield Fleet(tuple(members))


def _guard(stack: contextlib.ExitStack, path: Path, module: str, *arguments: str) -> None:
    """Start a program that ends with us, and with the stack; it writes to `path`."""
    output = stack.enter_context(path.open("wb"))
    command = [sys.executable, "-m", "arealite.launcher.place.guard", sys.executable, "-m", module, *arguments]
    env = environment(also_tests=True)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env, cwd=REPOSITORY)
    stack.callback(process.wait, 120)
    assert process.stdin is not None
    stack.enter_context(process.stdin)  # its end is the guard's sign to end


def _wait_ready(address: str) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            _ask(address, "/health", None)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _ask(address: str, endpoint: str, body: bytes | None) -> Any:
    request = urllib.request.Request(f"http://{address}{endpoint}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as reply:
        return json.loads(reply.read())

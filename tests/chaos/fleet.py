"""Inference servers that the run did not start, each behind a flaky proxy.

One that was killed comes back by itself; all of them must be in order when the run has ended.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.processes import Broken, environment, guarded
from harness.proxy import answering
from harness.wire import ask, wait_ready

from arealite.utils.network import LOOPBACK, hold_port, port_of
from chaos.flaky_proxy import FlakyProxy

_READY_S = 300.0
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Member:
    """A server and the proxy before it."""

    server: str
    proxy: FlakyProxy
    address: str
    """Of the proxy."""

    def complaint(self) -> str | None:
        """Say what is wrong with the server itself."""
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        try:
            wait_ready(self.server, _READY_S)
            answer = ask(self.server, "POST", "/generate", body, timeout_s=_ANSWER_S)
        except (OSError, Broken) as error:
            return f"{type(error).__name__}: {error}"
        sampled = answer.body["output_ids"] if answer.status == 200 else []
        return None if len(sampled) == 4 else f"it samples nothing: {answer}"


@dataclass(frozen=True)
class Fleet:
    """The servers of one run."""

    members: tuple[Member, ...]

    @property
    def proxies(self) -> tuple[str, ...]:
        return tuple(member.address for member in self.members)

    def faults(self) -> Counter[str]:
        """Count what the proxies did."""
        return sum((member.proxy.faults for member in self.members), Counter())

    def complaints(self) -> list[str]:
        """Say which servers are not as they were."""
        found = {member.server: member.complaint() for member in self.members}
        return [f"server {address} must be left in order: {text}" for address, text in found.items() if text]


@contextlib.contextmanager
def fleet(folder: Path, model: Path, *, size: int, seed: int, refuses: bool = True) -> Iterator[Fleet]:
    """Start servers and proxies, and end them; `seed` decides what proxies do, and one of them `refuses` weights."""
    folder.mkdir(parents=True)
    env = environment(also_tests=True)
    with contextlib.ExitStack() as stack:
        members = []
        for index in range(size):
            port = port_of(stack.enter_context(hold_port()))
            refused = random.Random(f"{seed} refuses").randint(10, 60) if refuses and index == 0 else -1
            served = ["--model-path", str(model), "--port", str(port), "--context", "512", "--seed", str(index)]
            command = [sys.executable, "-m", "chaos.respawn", sys.executable, "-m", "arealite.server", *served]
            stack.enter_context(guarded(command, folder / f"server-{index}.txt", env=env))
            proxy = FlakyProxy(f"{LOOPBACK}:{port}", seed=f"{seed}{index}", refused=refused)
            address = stack.enter_context(answering(proxy.answer))
            members.append(Member(f"{LOOPBACK}:{port}", proxy, address))
        for member in members:
            wait_ready(member.address, _READY_S)
        yield Fleet(tuple(members))

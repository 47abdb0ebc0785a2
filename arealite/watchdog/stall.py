"""Detects a stalled run, names the process responsible, and saves the evidence.

A run is stalled when the counters of all its processes have not moved for `timeout_s`. Until every process has come
to its first progress their output counts as well, and the start may take `setup_timeout_s`. Invariant: one verdict per
stall, on the console and, with everything it rests on, in `<run folder>/stall_<time>.txt`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arealite.watchdog.evidence import Evidence, Process, collect, read_progress
from arealite.watchdog.verdict import judge


@dataclass(frozen=True)
class StallPolicy:
    """When a run is stalled, and what becomes of it."""

    timeout_s: float
    setup_timeout_s: float
    on_stall: Literal["stop", "continue"]
    foreign_servers: Mapping[str, str]
    """Addresses, by name, of servers that someone else starts."""
    secret: str | None = None
    """What servers ask for before they tell how they are."""


class StallWatch:
    """Watches the processes that this one has started and that publish in `<logs>/progress`."""

    def __init__(
        self,
        policy: StallPolicy,
        *,
        logs: Path,
        servers: Mapping[str, str],
        expected: Sequence[str],
        count_output: Callable[[], int],
    ) -> None:
        """`servers` are addresses by name, `expected` the names of the processes that will publish."""
        self._policy = policy
        self._logs = logs
        self._servers = servers
        self._expected = expected
        self._count_output = count_output
        self._moved = time.monotonic()
        self._last: object = None
        self._timeout_s = 0.0

    async def next_stall(self) -> list[str]:
        """Wait for a stall and return the lines of its verdict."""
        while True:
            await self._standstill()
            stalled_s = time.monotonic() - self._moved
            look = functools.partial(collect, stalled_s=stalled_s, secret=self._policy.secret)
            evidence = await asyncio.to_thread(look, self._logs, self._servers, self._expected)
            if not self._has_moved():
                return self._tell(evidence)

    async def movement(self) -> None:
        """Wait until something moves again."""
        while not self._has_moved():
            await asyncio.sleep(self._period_s)

    @property
    def _period_s(self) -> float:
        return min(5.0, self._policy.timeout_s / 10)

    async def _standstill(self) -> None:
        while self._has_moved() or time.monotonic() - self._moved < self._timeout_s:
            await asyncio.sleep(self._period_s)

    def _has_moved(self) -> bool:
        """Look at all counters."""
        progress = read_progress(self._logs / "progress")
        counts: dict[str, int] = {process: one.count for process, one in progress.items()}
        self._timeout_s = self._policy.timeout_s
        if not {one.name for one in progress.values()} >= set(self._expected):
            counts["output"] = self._count_output()
            self._timeout_s = max(self._policy.timeout_s, self._policy.setup_timeout_s)
        has_moved = counts != self._last
        if has_moved:
            self._last, self._moved = counts, time.monotonic()
        return has_moved

    def _tell(self, evidence: Evidence) -> list[str]:
        lines = judge(evidence).lines(evidence)
        path = self._logs.parent / f"stall_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        try:
            path.write_text("\n".join([*lines, "", *_details(evidence)]) + "\n", encoding="utf-8")
        except OSError as error:
            return [*lines, f"    the evidence could not be written to {path}: {error}; {evidence.disk}"]
        return [*lines, f"    all stacks, waits and queues: {path}"]


def forget_progress(logs: Path) -> None:
    """Remove what processes publish only for the watch."""
    for name in ("progress", "stacks"):
        shutil.rmtree(logs / name, ignore_errors=True)


def _details(evidence: Evidence) -> list[str]:
    text = [f"disk: {evidence.disk}"]
    for server in evidence.servers:
        answer = server.error if server.answer is None else json.dumps(server.answer, default=repr)
        text.append(f"{server.name} at {server.address}, GET /server_info: {answer}")
    for one in evidence.processes:
        text += ["", f"{one.name} (pid {one.pid}): state {one.state}, {100 * one.cpu_share:.0f} % of a core"]
        text += [f"    {one.command}", *_published(one, evidence.now), *one.stacks.splitlines()]
    return text


def _published(one: Process, now: float) -> list[str]:
    if one.progress is None:
        return []
    told = one.progress
    text = [f"    count {told.count}, moved {now - told.moved:.1f} s ago, told {now - told.published:.1f} s ago"]
    text += [f"    waits for {wait.what} ({wait.on}), for {now - wait.since:.1f} s" for wait in told.waits]
    return text + [f"    {name}: {json.dumps(made)}" for name, made in told.reports.items()]

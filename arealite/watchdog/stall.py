"""Detects a stalled run, names the process responsible, and saves the evidence in `<run folder>/stall_<time>.txt`.

A run is stalled when the counters of all its processes have not moved for `timeout_s`. Until every process has come
to its first progress their output counts as well, and the start may take `setup_timeout_s`.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arealite.watchdog.evidence import Evidence, collect, read_progress
from arealite.watchdog.verdict import judge


@dataclass(kw_only=True)
class StallWatch:
    """Watches the processes that this one has started and that publish in `<logs>/progress`."""

    timeout_s: float
    setup_timeout_s: float
    logs: Path
    servers: Mapping[str, str]  # addresses by name
    expected: Sequence[str]  # names of the processes that will publish
    secret: str | None  # what servers ask for before they tell how they are
    count_output: Callable[[], int]
    _moved: float = field(default_factory=time.monotonic, init=False)
    _last: object = field(default=None, init=False)
    _limit_s: float = field(default=0.0, init=False)  # for the phase that the run is in

    async def next_stall(self) -> list[str]:
        """Wait for a stall and return the lines of its verdict."""
        while True:
            while self._has_moved() or time.monotonic() - self._moved < self._limit_s:
                await asyncio.sleep(self._period_s)
            stalled_s = time.monotonic() - self._moved
            evidence = await asyncio.to_thread(
                collect, self.logs, self.servers, self.expected, stalled_s=stalled_s, secret=self.secret
            )
            if not self._has_moved():
                return self._tell(evidence)

    async def movement(self) -> None:
        while not self._has_moved():
            await asyncio.sleep(self._period_s)

    @property
    def _period_s(self) -> float:
        return min(5.0, self.timeout_s / 10)

    def _has_moved(self) -> bool:
        progress = read_progress(self.logs / "progress")
        counts: dict[str, int] = {process: one.count for process, one in progress.items()}
        self._limit_s = self.timeout_s
        if not {one.name for one in progress.values()} >= set(self.expected):
            counts["output"] = self.count_output()
            self._limit_s = max(self.timeout_s, self.setup_timeout_s)
        has_moved = counts != self._last
        if has_moved:
            self._last, self._moved = counts, time.monotonic()
        return has_moved

    def _tell(self, evidence: Evidence) -> list[str]:
        lines = judge(evidence).lines(evidence)
        path = self.logs.parent / f"stall_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        try:
            text = "\n".join([*lines, "", *_details(evidence)]) + "\n"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")  # arguments of commands are any bytes
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
        text += ["", f"{one}: state {one.state}, {100 * one.cpu_share:.0f} % of a core", f"    {one.command}"]
        if told := one.progress:
            now = evidence.now
            text.append(
                f"    count {told.count}, moved {now - told.moved:.1f} s ago, told {now - told.published:.1f} s ago"
            )
            text += [f"    waits for {wait.what} ({wait.on}), for {now - wait.since:.1f} s" for wait in told.waits]
            text += [f"    {name}: {json.dumps(made)}" for name, made in told.reports.items()]
        text += one.stacks.splitlines()
    return text

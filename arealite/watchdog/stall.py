"""Detects a stalled run, names the process responsible, and saves the evidence in `<run folder>/stall_<time>.txt`.

A run is stalled if no process has made progress for `timeout_s`. Until every process has made its first progress, their
output counts as progress too, and the start may take `setup_timeout_s`.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arealite.utils.files import free_space
from arealite.watchdog.evidence import Evidence, collect, read_heartbeats
from arealite.watchdog.verdict import judge


@dataclass(frozen=True, kw_only=True)
class StallWatch:
    """Watches the processes that this one has started and that publish a heartbeat in `<logs>/progress`."""

    timeout_s: float
    setup_timeout_s: float
    logs: Path
    expected: Sequence[str]  # names of the processes that must have a heartbeat
    count_output: Callable[[], int]

    async def stall(self) -> list[str]:
        """Wait until the run is stalled and return the lines of the verdict."""
        counts: object = None
        moved = time.monotonic()
        while True:
            before, (counts, limit_s) = counts, self._look()
            stalled_s = time.monotonic() - moved
            if counts != before:
                moved = time.monotonic()
            elif stalled_s > limit_s:
                folder = self.logs / "progress"
                evidence = await asyncio.to_thread(collect, folder, self.expected, stalled_s=stalled_s)
                if self._look()[0] == counts:
                    return self._save(evidence)
            await asyncio.sleep(min(5.0, self.timeout_s / 10))

    def _look(self) -> tuple[object, float]:
        """Return counts that change with any progress, and for how many seconds they may stand still."""
        heartbeats = read_heartbeats(self.logs / "progress")
        counts = {(one.name, one.pid): one.count for one in heartbeats}
        if {one.name for one in heartbeats}.issuperset(self.expected):
            return counts, self.timeout_s
        return (counts, self.count_output()), max(self.timeout_s, self.setup_timeout_s)

    def _save(self, evidence: Evidence) -> list[str]:
        lines, disk = judge(evidence).lines(evidence), f"disk: {free_space(self.logs)}"
        path = self.logs.parent / f"stall_{time.strftime('%Y%m%d_%H%M%S')}.txt"
        try:
            path.write_text("\n".join([*lines, "", disk, *_details(evidence)]) + "\n", encoding="utf-8")
        except OSError as error:
            return [*lines, f"    the evidence could not be written to {path}: {error}; {disk}"]
        return [*lines, f"    all stacks, waits and queues: {path}"]


def _details(evidence: Evidence) -> list[str]:
    text = []
    for process in evidence.processes:
        text += ["", str(process), json.dumps(asdict(process) | {"stacks": ""}, indent=1), *process.stacks.splitlines()]
    return text

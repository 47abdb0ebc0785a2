"""Which servers are much slower than the others, or answer badly: they are drained, and readmitted once they prove fit.

A server is slow if two times are several times the median of the others': what a request takes per token, and what the
server takes per token of all its requests. With many requests a sound server may be slow in the first, with few in the
second, but only a slow one is in both, however unequal the loads. A drained server gets no requests while others can
take them, and now and then a small one of ours; a fast answer readmits it. Invariant: each relapse doubles the pause
before the next probe, so a server on the edge changes sides ever more rarely.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from arealite.api.errors import ServerError
from arealite.inference.pool import Server, ServerSet

logger = logging.getLogger("arealite.client")

_SLOW = 4.0
"""Times the median of the others from which a server is drained."""
_FIT = 2.0
"""Times the median of the others up to which it is readmitted."""
_MIN_SAMPLES = 10
_MIN_TOKENS = 8
"""Shorter answers say more about the prompt."""
_WEIGHT = 0.2
"""Of the newest answer in the averages."""
_MAX_ERRORS = 3
"""In a row."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 10.0, 600.0


@dataclass
class _Record:
    """What is known of one server's answers."""

    num_samples: int = 0
    token_s: float = 0.0
    """What a request takes per token."""
    work_s: float = 0.0
    """What the server takes per token of all its requests."""
    num_errors: int = 0
    """In a row."""
    pause_s: float = _FIRST_PAUSE_S
    """Before the next probe."""
    readmitted_at: float = float("-inf")


class Pace:
    """Judges the members of a server set; lives in one event loop."""

    def __init__(self, servers: ServerSet, probe: Callable[[Server], Awaitable[float]]) -> None:
        """`probe` lets a server complete a small request and returns the seconds per token."""
        self._servers = servers
        self._probe = probe
        self._records: dict[Server, _Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def note_answer(self, server: Server, *, num_tokens: int, seconds: float, num_in_flight: float) -> None:
        """Take in an answer of a server that had so many requests meanwhile, on average."""
        record = self._record(server)
        record.num_errors = 0
        if num_tokens < _MIN_TOKENS:
            return
        token_s = seconds / num_tokens
        work_s = token_s / max(1.0, num_in_flight)
        weight = max(_WEIGHT, 1 / (record.num_samples + 1))
        record.token_s += weight * (token_s - record.token_s)
        record.work_s += weight * (work_s - record.work_s)
        record.num_samples += 1
        others = self._known_others(server)
        if record.num_samples < _MIN_SAMPLES or not others:
            return
        factor = min(
            record.token_s / statistics.median(one.token_s for one in others),
            record.work_s / statistics.median(one.work_s for one in others),
        )
        if factor > _SLOW:
            self._drain(server, f"takes {factor:.1f} times as long per token as the others")

    def note_error(self, server: Server) -> None:
        """Take in that a server has answered with an error; one that leaves may do so."""
        if server not in self._servers.servers:
            return
        record = self._record(server)
        record.num_errors += 1
        if record.num_errors >= _MAX_ERRORS:
            self._drain(server, f"has answered with {record.num_errors} errors in a row")

    def _record(self, server: Server) -> _Record:
        if server not in self._records:
            members = set(self._servers.servers) | {server}
            self._records = {one: record for one, record in self._records.items() if one in members}
            self._records[server] = _Record()
        return self._records[server]

    def _known_others(self, server: Server) -> list[_Record]:
        others = [self._records.get(one) for one in self._servers.live if one is not server and not one.is_drained]
        return [one for one in others if one is not None and one.num_samples >= _MIN_SAMPLES]

    def _drain(self, server: Server, why: str) -> None:
        """Let others take its requests, if there are any, and look after it until it is fit."""
        if server.is_drained or not any(one is not server and not one.is_drained for one in self._servers.live):
            return
        record, now = self._record(server), asyncio.get_running_loop().time()
        is_relapse = now - record.readmitted_at < 10 * record.pause_s
        record.pause_s = min(2 * record.pause_s, _MAX_PAUSE_S) if is_relapse else _FIRST_PAUSE_S
        self._servers.note_drained(server, True)
        logger.warning(
            "server %s %s: it gets no requests while others can take them, and is asked again every %g s",
            *(server.address, why, record.pause_s),
        )
        task = asyncio.create_task(self._readmit(server, record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _readmit(self, server: Server, record: _Record) -> None:
        """Ask for a small completion now and then until it comes in time."""
        while True:
            await asyncio.sleep(record.pause_s)
            if server not in self._servers.servers:
                return
            if server not in self._servers.live:
                continue
            try:
                token_s = await self._probe(server)
            except ServerError:
                continue
            others = self._known_others(server)
            if not others or token_s <= _FIT * statistics.median(one.token_s for one in others):
                break
        record.num_samples = record.num_errors = 0
        record.readmitted_at = asyncio.get_running_loop().time()
        self._servers.note_drained(server, False)
        logger.warning("server %s is fit again (%.3g s per token): it gets requests", server.address, token_s)

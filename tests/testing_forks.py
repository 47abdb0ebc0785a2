"""Processes that start in 0.1 instead of 6 CPU seconds: forks of a process that has imported torch and our rooms.

That process has one thread and does nothing else, so its forks behave like fresh interpreters. A program is a function
of an importable module, here or in a test.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import psutil

from arealite.engine.ppo import actor
from arealite.server import __main__ as server
from arealite.utils.network import hold_port, port_of
from arealite.weights import publish

DEADLINE_S = 120.0
"""For processes that must end; only a failing test waits so long."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([module.__name__ for module in (server, publish, actor)])


def start(program: Callable[..., object], *arguments: Any, **environment: str) -> ForkServerProcess:
    """Start `program(*arguments)` with changes to the environment that this session began with."""
    process = _CONTEXT.Process(target=_run, args=(environment, program, arguments), daemon=True)
    process.start()
    return process


def _run(environment: dict[str, str], program: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    raise SystemExit(program(*arguments))


@dataclass
class Rank:
    """One of the ranks of a group, and the pipe between its program and the test."""

    process: ForkServerProcess
    pipe: Connection

    def receive(self) -> Any:
        """Return what the program sends next."""
        assert self.pipe.poll(DEADLINE_S), f"a rank must send something within {DEADLINE_S:.0f} s"
        return self.pipe.recv()

    def end(self) -> int | None:
        """Wait for the process and return its exit status."""
        self.process.join(DEADLINE_S)
        return self.process.exitcode


@contextlib.contextmanager
def two_ranks(program: Callable[..., object], *arguments: Any) -> Iterator[list[Rank]]:
    """Run `program(pipe, *arguments)` as two ranks of one group, as torchrun does; kill what the block leaves."""
    ranks: list[Rank] = []
    with hold_port() as holder:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(holder)), "WORLD_SIZE": "2"}
        try:
            for rank in ("0", "1"):
                ours, theirs = multiprocessing.Pipe()
                with theirs:
                    process = start(program, theirs, *arguments, **group, RANK=rank, LOCAL_RANK=rank)
                ranks.append(Rank(process, ours))
            yield ranks
        finally:
            for one in ranks:
                one.process.kill()
                one.process.join()
                one.pipe.close()


def cpu_s() -> float:
    """Return the CPU seconds of the process that forks, and of its forks that have ended."""
    pid = forkserver._forkserver._forkserver_pid
    return sum(psutil.Process(pid).cpu_times()[:4]) if pid else 0.0

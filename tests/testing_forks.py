"""Processes that start in 0.1 instead of 6 CPU seconds: forks of a process that has imported torch and our rooms.

That process has one thread and does nothing else, so its forks behave like fresh interpreters. A program is a function
of an importable module, here or in a test.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
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
_starting = threading.Lock()  # a start reads the status of all that have ended, and a second reader would get 255
_PRELOADED = [module.__name__ for module in (server, publish, actor)]
_CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(module: str) -> None:
    """Import one more module once for all forks; called before the first one."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, module])


def start(program: Callable[..., object], *arguments: Any, **environment: str) -> ForkServerProcess:
    """Start `program(*arguments)` with changes to the environment that this session began with."""
    process = _CONTEXT.Process(target=_run, args=(environment, program, arguments), daemon=True)
    with _starting:
        process.start()
    return process


def status_of(process: ForkServerProcess, timeout_s: float) -> int | None:
    """Wait for a process, also beside other threads that start some, and return its exit status; None: it runs."""
    wait([process.sentinel], timeout_s)
    with _starting:
        return process.exitcode


def _run(environment: dict[str, str], program: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    raise SystemExit(program(*arguments))


@dataclass
class Fork:
    """A process, and the pipe between its program and the test."""

    process: ForkServerProcess
    pipe: Connection

    def receive(self) -> Any:
        """Return what the program sends next."""
        assert self.pipe.poll(DEADLINE_S), f"the program must send something within {DEADLINE_S:.0f} s"
        return self.pipe.recv()

    def end(self) -> int | None:
        """Wait for the process and return its exit status."""
        self.process.join(DEADLINE_S)
        return self.process.exitcode


@contextlib.contextmanager
def connected(program: Callable[..., object], *arguments: Any, **environment: str) -> Iterator[Fork]:
    """Run `program(pipe, *arguments)`, and kill it if the block leaves it."""
    ours, theirs = multiprocessing.Pipe()
    with ours:
        with theirs:
            process = start(program, theirs, *arguments, **environment)
        try:
            yield Fork(process, ours)
        finally:
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks_of(num: int, program: Callable[..., object], *arguments: Any) -> Iterator[list[Fork]]:
    """Run `program(pipe, *arguments)` as the ranks of one group, as torchrun does."""
    with contextlib.ExitStack() as stack:
        port = str(port_of(stack.enter_context(hold_port())))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num)}
        ranks = [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(num))]
        yield [stack.enter_context(connected(program, *arguments, **rank)) for rank in ranks]


two_ranks = functools.partial(ranks_of, 2)


def cpu_s() -> float:
    """Return the CPU seconds of the process that forks, and of its forks that have ended."""
    pid = forkserver._forkserver._forkserver_pid
    return sum(psutil.Process(pid).cpu_times()[:4]) if pid else 0.0

"""Runs programs that a model wrote: isolated, limited and watched.

A program sees no network, no processes but its own, a read-only system, and one writable folder, in memory, that ends
with it. Whatever it does, the call ends by the deadline and leaves no process. A failure to isolate it is an error and
never a result. docs/security.md lists the attacks that were tried, and what a sandbox does not protect from.
"""

import asyncio
import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from arealite.api.errors import ConfigError, EnvError
from arealite.reward import confinement
from arealite.reward.confinement import Confined, Limits
from arealite.utils import heartbeat
from arealite.utils.processes import exit_status, kill_tree
from arealite.utils.threads import DaemonThreads

__all__ = ["Limits", "Sandbox", "SandboxResult", "python_tool"]

Reason = Literal["time", "cpu", "memory", "processes", "files", "output"]
_LOOK_S = 0.05  # interval at which processes are counted and weighed
_END_S = 10.0  # deadline for the end of what was killed
_CHUNK = 1 << 16
_MAX_INODES = 10_000  # files that it may have: an empty one has no size, and takes memory all the same
_OURS = 2  # processes: bubblewrap, and the first one in the namespace
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it wrote."""

    exit_status: int
    """As a shell reports it: 128 + n if signal n ended it."""
    stdout: str
    stderr: str
    reason: Reason | None
    """The limit that it reached, and for which it was ended."""
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.reason == "time"


@dataclass(frozen=True)
class Sandbox:
    """A place for programs, of which at most `max_concurrent` run at once (None: one per CPU of this process).

    `isolation="process"` keeps the limits, but for the size of the folder, and isolates a program from nothing.
    """

    limits: Limits = field(default_factory=Limits)
    isolation: Literal["bubblewrap", "process"] = "bubblewrap"
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        if self.isolation not in ("bubblewrap", "process"):
            raise ConfigError(f"isolation must be bubblewrap or process: got {self.isolation!r}. Use bubblewrap.")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ConfigError(f"max_concurrent of a sandbox must be positive: got {self.max_concurrent}. Use None.")

    async def run(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = "",
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run Python source or a command among `files`, whose names are relative, as soon as a slot is free.

        Raises EnvError where programs can't be isolated, or if somebody else killed the sandbox.
        """
        is_given_up = threading.Event()
        call = functools.partial(self.run_here, files=files, stdin=stdin, limits=limits, is_given_up=is_given_up)
        try:
            return await asyncio.wrap_future(self._slots.submit(call, program))
        finally:
            is_given_up.set()

    def run_here(
        self,
        program: str | Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = "",
        limits: Limits | None = None,
        is_given_up: threading.Event | None = None,
    ) -> SandboxResult:
        """Do the same at once in this thread: for plain functions, such as rewards, which have workers of their own."""
        files, limits = dict(files or {}), limits or self.limits
        if isinstance(program, str):
            files, program = files | {"main.py": program}, [confinement.python(), "main.py"]
        for name in files:
            if PurePosixPath(name).is_absolute() or not name or {"", ".", ".."} & {*name.split("/")}:
                raise ValueError(f"a file of a sandbox must have a relative name: got {name!r}. Write e.g. data/a.txt.")
        confine = confinement.in_bubblewrap if self.isolation == "bubblewrap" else confinement.in_process
        with contextlib.ExitStack() as cleanup:
            given = confinement.memory_file(stdin)
            cleanup.callback(os.close, given)
            run = _Run(confine(program, files, limits, cleanup), given, limits, cleanup)
            with heartbeat.waiting("a program in a sandbox", on="reward", pid=run.process.pid):
                return run.until_its_end(is_given_up or threading.Event())

    async def python_tool(self, code: str) -> str:
        """Run a Python program and return what it prints. Each call begins anew, in an empty folder.

        Args:
            code: The program. It must print what it is to show.
        """
        result = await self.run(code)
        written = result.stdout + result.stderr
        if result.reason is not None:
            return f"{written}\n[ended: too much {result.reason}]"
        return written if result.exit_status == 0 else f"{written}\n[exit status {result.exit_status}]"

    @functools.cached_property
    def _slots(self) -> DaemonThreads:
        return DaemonThreads(self.max_concurrent or len(os.sched_getaffinity(0)), "sandbox")


python_tool = Sandbox(Limits(output_kib=8)).python_tool
"""A tool for agents, with little output, so that it fits a context."""


class _Run:
    """One program, from its start to its end, in one thread."""

    def __init__(self, confined: Confined, stdin: int, limits: Limits, cleanup: contextlib.ExitStack) -> None:
        self._limits = limits
        self._cleanup = cleanup
        self._status = confined.status
        self._first: int | None = None  # handle of the first process of the namespace, with which all others end
        self._root: int | None = None  # its pid
        self._began = time.monotonic()
        ends = [os.pipe() for _ in range(2)]
        for end, theirs in ends:
            cleanup.callback(os.close, end)
            if os.geteuid() == 0 and confined.status is not None:
                os.fchown(theirs, confinement.NOBODY, confinement.NOBODY)  # for programs that open /dev/stdout
        self._outputs = [end for end, _ in ends]
        self._read: dict[int, bytearray] = {end: bytearray() for end in self._outputs}
        if confined.status is not None:
            self._read[confined.status] = bytearray()
        for end in self._read:
            os.set_blocking(end, False)
        try:
            self.process = subprocess.Popen(
                confined.command,
                stdin=stdin,
                stdout=ends[0][1],
                stderr=ends[1][1],
                pass_fds=confined.descriptors,
                cwd=confined.folder,
                env=confined.environment,
                process_group=0,
            )
        finally:
            for _, theirs in ends:
                os.close(theirs)
        cleanup.callback(self._end)  # before its files are closed and its folder goes

    def until_its_end(self, is_given_up: threading.Event) -> SandboxResult:
        """Read what it writes, as far as its limits allow, until it ends or is ended."""
        ended = os.pidfd_open(self.process.pid)
        self._cleanup.callback(os.close, ended)
        reason: Reason | None = None
        next_look = self._began
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._read, ended):
                selector.register(descriptor, selectors.EVENT_READ)
            ready: set[int] = set()
            while ended not in ready and reason is None and not is_given_up.is_set():
                ready = {key.fd for key, _ in selector.select(max(0.0, next_look - time.monotonic()))}
                for descriptor in ready - {ended}:
                    if not self._take(descriptor):
                        selector.unregister(descriptor)
                if time.monotonic() >= next_look and ended not in ready:
                    reason = self._over_a_limit()
                    next_look = time.monotonic() + _LOOK_S
                reason = "output" if self._wrote_too_much() else reason
        seconds = time.monotonic() - self._began
        self._end()
        for descriptor in self._read:  # what it wrote just before
            while not self._wrote_too_much() and self._take(descriptor):
                pass
        returncode = self.process.returncode
        if reason is None and not is_given_up.is_set():
            reason = "output" if self._wrote_too_much() else None
            self._check_that_it_ran(returncode)
        cap = self._limits.output_kib << 10
        stdout, stderr = (self._read[end][:cap].decode(errors="replace") for end in self._outputs)
        return SandboxResult(exit_status(returncode), stdout, stderr, reason, seconds)

    def _take(self, descriptor: int) -> bool:
        """Read what is there; False if there is nothing."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        self._read[descriptor] += chunk
        if descriptor == self._status and self._first is None and b"\n" in self._read[descriptor]:
            with contextlib.suppress(ProcessLookupError):  # it may have ended
                self._root = json.loads(self._read[descriptor].partition(b"\n")[0])["child-pid"]
                self._first = os.pidfd_open(self._root)
                self._cleanup.callback(os.close, self._first)
        return bool(chunk)

    def _wrote_too_much(self) -> bool:
        return any(len(self._read[end]) > self._limits.output_kib << 10 for end in self._outputs)

    def _over_a_limit(self) -> Reason | None:
        """Return the limit that the program has reached, if any."""
        if time.monotonic() - self._began > self._limits.time_s:
            return "time"
        tasks, cpu_s, memory = _usage(self.process.pid, self._limits.processes)
        if tasks > self._limits.processes + _OURS:
            return "processes"
        if cpu_s > self._limits.cpu_s:
            return "cpu"
        if memory > self._limits.memory_mib << 20:
            return "memory"
        return "files" if self._num_inodes() > _MAX_INODES else None

    def _num_inodes(self) -> int:
        """Count the files of an isolated program, through the eyes of its first process."""
        number = 0
        sizes_mib = {confinement.FOLDER: self._limits.disk_mib, "/dev/shm": confinement.SHARED_MIB}
        for place, size_mib in sizes_mib.items():
            with contextlib.suppress(OSError):  # it may end
                found = os.statvfs(f"/proc/{self._root}/root{place}")
                if found.f_blocks * found.f_frsize == size_mib << 20:  # else the sandbox is not made yet
                    number += found.f_files - found.f_ffree
        return number

    def _check_that_it_ran(self, returncode: int) -> None:
        """Raise if it was bubblewrap that ended, and no program."""
        if self._status is None or b"exit-code" in self._read[self._status]:
            return
        if returncode < 0:
            raise EnvError(f"a sandbox must not be killed: got {signal.Signals(-returncode).name}. Free memory.")
        told = self._read[self._outputs[1]].decode(errors="replace").strip()[-500:]
        raise EnvError(f"a sandbox must start: got {told!r}. {confinement.ADVICE}.")

    def _end(self) -> None:
        """End what is left of it."""
        if self.process.returncode is not None:
            return
        if self._status is None:
            kill_tree(self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            # bubblewrap ends when it has reaped the first process, and that when all others have ended.
        else:
            self.process.kill()
        self.process.wait(_END_S)


def _usage(pid: int, enough: int) -> tuple[int, float, int]:
    """Return threads, CPU seconds and resident bytes of a process and its descendants, as far as `enough` threads."""
    tasks, ticks, pages, found = 0, 0, 0, [pid]
    for process in found:
        with contextlib.suppress(OSError):  # it may end meanwhile
            with open(f"/proc/{process}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()
            ticks += sum(map(int, state[11:15]))  # its own, and those of children that it has waited for
            tasks += int(state[17])
            pages += int(state[21])
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                    found += map(int, file.read().split())
        if tasks > enough + _OURS:
            break
    return tasks, ticks * _TICK_S, pages * _PAGE

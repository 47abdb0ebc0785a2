"""Runs one job on this machine, under a guard, with an output of its own for each rank of the trainer.

The job is told where its ranks write to and report by variables of its environment (see `rank`); both are pipes of this
process, which the ranks open by path. Everything is read by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import termios
from collections.abc import Callable, Sequence

from arealite.launcher.place.base import Job, Listener, Seat
from arealite.launcher.plan.plan import Placement
from arealite.launcher.supervise.console import Console
from arealite.utils.environment import RANK_REPORT_VARIABLE, RANK_STREAMS_VARIABLE
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.processes import exit_status

_READ_BYTES = 1 << 16


class Stream:
    """A pipe, or a terminal of its own, whose far end other processes write to."""

    def __init__(self, take: Callable[[bytes], None], *, as_terminal_of: Console | None = None) -> None:
        self.reader, self.writer = os.openpty() if as_terminal_of else os.pipe()
        self._take = take
        os.set_blocking(self.reader, False)
        if as_terminal_of:
            attributes = termios.tcgetattr(self.writer)
            attributes[1] &= ~termios.OPOST  # the user's terminal translates newlines itself
            termios.tcsetattr(self.writer, termios.TCSANOW, attributes)
            self.copy_size(as_terminal_of)
        asyncio.get_running_loop().add_reader(self.reader, self._read)

    @property
    def path(self) -> str:
        """Path by which our descendants open the far end, however many processes are between us."""
        return f"/proc/{os.getpid()}/fd/{self.writer}"

    def copy_size(self, console: Console) -> None:
        """Take over the size of the user's terminal."""
        size = fcntl.ioctl(console.fileno(), termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(self.writer, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Hand on what ended processes have written, and close both ends."""
        asyncio.get_running_loop().remove_reader(self.reader)
        while self._read():
            pass
        os.close(self.reader)
        os.close(self.writer)

    def _read(self) -> bool:
        """Hand on what is there and tell whether there was anything."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.reader, _READ_BYTES)
        if data:
            self._take(data)
        return bool(data)


class JobRun:
    """A job on this machine."""

    def __init__(self, *, console: Console | None = None) -> None:
        """Rank 0 gets a terminal if the console is one."""
        self._console = console
        self._guard: asyncio.subprocess.Process | None = None
        self._killed = asyncio.Event()

    async def run(self, job: Job, listener: Listener) -> int:
        """Run the job to its end and return its exit status."""
        if self._killed.is_set():  # killed before it began
            return exit_status(-signal.SIGKILL)
        with contextlib.ExitStack() as streams:

            def stream(take: Callable[[bytes], None], *, is_foreground: bool = False) -> Stream:
                console = self._console if is_foreground and self._console and self._console.is_terminal else None
                one = Stream(take, as_terminal_of=console)
                streams.callback(one.close)
                if console is not None:
                    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, one.copy_size, console)
                return one

            output = stream(lambda data: listener.output(job.name, data))
            report = stream(lambda data: _report(data, listener))
            ranks = [stream(_output_of(rank, listener), is_foreground=rank == 0) for rank in job.ranks]
            ours = {
                RANK_STREAMS_VARIABLE: ",".join(one.path for one in ranks),
                RANK_REPORT_VARIABLE: report.path,
            }
            self._guard = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "arealite.launcher.place.guard", *job.command],
                cwd=job.folder,
                env=os.environ | job.env | (ours if job.ranks else {}),
                stdin=asyncio.subprocess.PIPE,
                stdout=output.writer,
                stderr=output.writer,
                start_new_session=True,
            )
            if self._killed.is_set():
                self.kill()
            return exit_status(await self._guard.wait())

    def terminate(self) -> None:
        """Send the job SIGTERM; one that has not begun yet never does."""
        if self._guard is None:
            self._killed.set()
        else:
            with contextlib.suppress(ProcessLookupError):
                self._guard.terminate()

    def kill(self) -> None:
        """End the job with all its descendants."""
        self._killed.set()
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()


class LocalSeat(JobRun):
    """A seat on this machine."""

    node = "this machine"
    address = LOOPBACK

    def __init__(self, console: Console) -> None:
        super().__init__(console=console)
        self._holder = hold_port()
        self.port = port_of(self._holder)

    async def close(self) -> None:
        """Give the port back."""
        self._holder.close()


class LocalPlace:
    """This machine as a place for all jobs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def seats(self, placements: Sequence[Placement]) -> list[Seat]:
        """Return a seat for each placement."""
        return [LocalSeat(self._console) for _ in placements]

    async def close(self) -> None:
        """There is nothing to give back."""


def _output_of(rank: int, listener: Listener) -> Callable[[bytes], None]:
    return lambda data: listener.output(f"trainer-{rank}", data)


def _report(data: bytes, listener: Listener) -> None:
    for line in data.decode().splitlines():
        rank, status = (int(word) for word in line.split())
        listener.rank_ended(rank, status)

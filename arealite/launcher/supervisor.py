"""Runs the jobs of a run until the first of them ends or a signal comes, then ends all of them within seconds.

Servers and trainer start together, because both take seconds to import what they need. Every job is started through a
`guard`, so ending a guard ends the job with all its descendants, and so does the end of this process. One event loop
reads all outputs; only timeouts, the wait for a server's health and the look for a stall are timed, everything else is
an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.launcher.console import Console, Output, Show
from arealite.launcher.roles import Job, ServerJob
from arealite.launcher.stall import StallPolicy, StallWatch, forget_progress
from arealite.utils.beacon import FOLDER_VARIABLE, NAME_VARIABLE
from arealite.utils.network import LOOPBACK
from arealite.utils.processes import adopt_orphans, descendants, describe_exit, exit_status, kill_tree

SERVER_FAILED = 3
STALLED = 4
_GRACE_S = 5.0
_REFUSAL = re.compile(r"arealite\.api\.errors\.(Config|Checkpoint|Ledger)Error: ")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ending:
    """Why the run ended: the launcher's exit status, and whose output explains it."""

    status: int
    reason: str
    output: Output | None = None

    @property
    def is_failure(self) -> bool:
        return self.output is not None or self.status == STALLED

    @property
    def is_refusal(self) -> bool:
        """Whether the program said that it can't run as it is, so that starting it again would end alike."""
        return self.output is not None and any(_REFUSAL.match(line) for line in self.output.tail)


class Stream:
    """A pipe, or a terminal of its own, whose far end other processes write to."""

    def __init__(self, *, as_terminal_of: Console | None = None) -> None:
        self.reader, self.writer = os.openpty() if as_terminal_of else os.pipe()
        os.set_blocking(self.reader, False)
        if as_terminal_of:
            attributes = termios.tcgetattr(self.writer)
            attributes[1] &= ~termios.OPOST  # the user's terminal translates newlines itself
            termios.tcsetattr(self.writer, termios.TCSANOW, attributes)
            self.copy_size(as_terminal_of)

    @property
    def path(self) -> str:
        """Path by which our descendants open the far end, however many processes are between us."""
        return f"/proc/{os.getpid()}/fd/{self.writer}"

    def copy_size(self, console: Console) -> None:
        """Take over the size of the user's terminal."""
        size = fcntl.ioctl(console.fileno(), termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(self.writer, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        """Return what is there, nothing if that is nothing."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reader, 1 << 16)
        return b""

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reader)
        os.close(self.writer)


class Supervisor:
    """The jobs of one run, their outputs and the console. Leaving its context ends everything and tells why."""

    def __init__(self, *, log_folder: Path, console: Console, stall: StallPolicy) -> None:
        self._console = console
        self._log_folder = log_folder
        self._stall = stall
        forget_progress(log_folder)
        self._log = Output("launcher", log_folder / "launcher.log", console)
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Stream, Output] = {}
        self._guards: dict[str, asyncio.subprocess.Process] = {}
        self._servers: list[ServerJob] = []
        self._num_output_bytes = 0
        self._endings: list[asyncio.Future[Ending]] = []
        self._before = set(descendants(os.getpid()))
        self._adopted_before = adopt_orphans()
        self._ending: Ending | None = None
        self._report = Stream()
        self._signal: asyncio.Future[int] = self._loop.create_future()
        self._watch(self._signalled())
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._loop.add_signal_handler(number, self._take_signal, number)

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stop()
        self._read_rest()
        forget_progress(self._log_folder)
        if self._ending is not None and self._ending.output is not None:
            self._explain(self._ending, self._ending.output)
        self._log.close()
        self._console.close()

    def say(self, text: str) -> None:
        """Tell the user what happens."""
        self._log.feed(f"{text}\n".encode())

    async def start_servers(self, jobs: Sequence[ServerJob], *, setup_timeout_s: float) -> None:
        """Start servers; each of them must become healthy in time and then stay alive."""
        self._servers += jobs
        for job in jobs:
            output = await self._start(job, show="warnings")
            self._watch(self._server_end(job, output))
            self._watch(self._server_late(job, output, setup_timeout_s))

    async def start_trainer(self, num_ranks: int, describe: Callable[[list[str], str], Job]) -> None:
        """Start the trainer that `describe(paths of the ranks' streams, path of the report)` returns.

        The first rank that fails ends the run, and so does the end of torchrun. From now on nothing may stand still:
        without a trainer, idle servers may.
        """
        ranks = [self._stream(f"trainer-{rank}", is_foreground=rank == 0) for rank in range(num_ranks)]
        failed: asyncio.Future[Ending] = self._loop.create_future()

        def take_report() -> None:
            for line in self._report.read().decode().splitlines():
                rank, status = (int(word) for word in line.split())
                if status != 0 and not failed.done():
                    failed.set_result(_failure(self._streams[ranks[rank]], status))

        self._loop.add_reader(self._report.reader, take_report)
        self._endings.append(failed)
        job = describe([stream.path for stream in ranks], self._report.path)
        self._watch(self._trainer_end(job, await self._start(job, show="nothing")))
        self._watch(self._stalled(num_ranks))

    async def wait(self) -> int:
        """Wait for what ends the run and return the launcher's exit status. A server's end explains a failure of the
        trainer, so it is told first; the user's signal explains everything."""
        await asyncio.wait(self._endings, return_when=asyncio.FIRST_COMPLETED)
        if all(ending.is_failure and ending.status != SERVER_FAILED for ending in self._ended()):
            await asyncio.wait([end for end in self._endings if not end.done()], timeout=0.5)
        self._ending = min(self._ended(), key=lambda ending: (ending.is_failure, ending.status != SERVER_FAILED))
        if self._ending.status != 0:
            self.say(f"{self._ending.reason}: stopping everything")
        return self._ending.status

    @property
    def ending(self) -> Ending:
        """Why the run ended; a signal that came while everything was being stopped is the user's last word."""
        if self._signal.done():
            return _signalled(self._signal.result())
        assert self._ending is not None, "only a run that has ended knows why"
        return self._ending

    def _stream(self, name: str, *, show: Show = "all", is_foreground: bool = False) -> Stream:
        """Open the output of a process; the foreground's is a terminal if ours is."""
        is_terminal = is_foreground and self._console.is_terminal
        stream = Stream(as_terminal_of=self._console if is_terminal else None)
        path = self._log_folder / f"{name}.log"
        output = Output(name, path, self._console, show=show, is_foreground=is_foreground)
        self._streams[stream] = output
        self._loop.add_reader(stream.reader, self._take_output, stream, output)
        if is_terminal:
            self._loop.add_signal_handler(signal.SIGWINCH, stream.copy_size, self._console)
        return stream

    def _take_output(self, stream: Stream, output: Output) -> None:
        data = stream.read()
        self._num_output_bytes += len(data)
        output.feed(data)

    async def _start(self, job: Job, *, show: Show) -> Output:
        stream = self._stream(job.name, show=show)
        self._guards[job.name] = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "arealite.launcher.guard", *job.command],
            env=job.env | {FOLDER_VARIABLE: str(self._log_folder / "progress"), NAME_VARIABLE: job.name},
            stdin=asyncio.subprocess.PIPE,
            stdout=stream.writer,
            stderr=stream.writer,
            start_new_session=True,
        )
        return self._streams[stream]

    def _watch(self, ending: Coroutine[None, None, Ending]) -> None:
        self._endings.append(self._loop.create_task(ending))

    async def _server_end(self, job: ServerJob, output: Output) -> Ending:
        status = exit_status(await self._guards[job.name].wait())
        return Ending(SERVER_FAILED, f"{job.name} ended with {describe_exit(status)}", output)

    async def _server_late(self, job: ServerJob, output: Output, timeout_s: float) -> Ending:
        """Return when the server did not become healthy in time."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._healthy(job, lambda: self._say_waiting(job, time.monotonic() - started, timeout_s))
        except TimeoutError:
            return Ending(SERVER_FAILED, f"{job.name} was not ready within {timeout_s:g} s", output)
        self.say(f"{job.name} is ready at {job.address} after {time.monotonic() - started:.1f} s")
        return await self._loop.create_future()

    async def _healthy(self, job: ServerJob, say_waiting: Callable[[], None]) -> None:
        next_word = time.monotonic() + 10
        while not await _is_healthy(job.port):
            await asyncio.sleep(0.1)
            if time.monotonic() > next_word:
                say_waiting()
                next_word += 10

    def _say_waiting(self, job: ServerJob, waited_s: float, timeout_s: float) -> None:
        self.say(f"waiting for {job.name} ({waited_s:.0f} s of {timeout_s:g} s)")

    async def _trainer_end(self, job: Job, output: Output) -> Ending:
        status = exit_status(await self._guards[job.name].wait())
        return Ending(0, "the trainer is done") if status == 0 else _failure(output, status)

    async def _stalled(self, num_ranks: int) -> Ending:
        """Return when the run stands still and may not go on."""
        ours = [job.name for job in self._servers if job.publishes_progress]
        watch = StallWatch(
            self._stall,
            logs=self._log_folder,
            servers={job.name: job.address for job in self._servers} | dict(self._stall.foreign_servers),
            expected=[*ours, *(f"trainer-{rank}" for rank in range(num_ranks))],
            count_output=lambda: self._num_output_bytes,
        )
        while True:
            for line in await watch.next_stall():
                self.say(line)
            if self._stall.on_stall == "stop":
                return Ending(STALLED, "the run is stalled")
            await watch.movement()
            self.say("something moves again")

    async def _signalled(self) -> Ending:
        return _signalled(await asyncio.shield(self._signal))

    def _ended(self) -> list[Ending]:
        return [end.result() for end in self._endings if end.done()]

    def _take_signal(self, number: int) -> None:
        """End the run at the first signal, and without grace at the second."""
        if not self._signal.done():
            self._signal.set_result(number)
        else:
            for guard in self._guards.values():
                _close_input(guard)

    async def _stop(self) -> None:
        """End all jobs, then what they left behind if a guard was killed."""
        for task in self._endings:
            task.cancel()
        await asyncio.gather(*[_end(guard) for guard in self._guards.values()])
        for pid in set(descendants(os.getpid())) - self._before:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        adopt_orphans(self._adopted_before)

    def _read_rest(self) -> None:
        """Read what ended processes have written."""
        for stream, output in self._streams.items():
            self._loop.remove_reader(stream.reader)
            while data := stream.read():
                output.feed(data)
            stream.close()
            output.close()
        self._loop.remove_reader(self._report.reader)
        self._report.close()

    def _explain(self, ending: Ending, output: Output) -> None:
        last = f"its last {len(output.tail)} lines:" if output.tail else "it wrote nothing."
        self.say(f"{ending.reason}; {last}")
        for line in output.tail:
            self._console.line(f"    {line}")
        self.say(f"its whole log: {output.path}")


def _failure(output: Output, status: int) -> Ending:
    return Ending(status, f"{output.name} failed with {describe_exit(status)}", output)


def _signalled(number: int) -> Ending:
    return Ending(128 + number, f"received {signal.Signals(number).name}")


async def _is_healthy(port: int) -> bool:
    """Ask GET /health once."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            with contextlib.closing(writer):
                request = f"GET /health HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode())
                status_line = await reader.readline()
                return status_line.split()[1:2] == [b"200"]
    return False


async def _end(guard: asyncio.subprocess.Process) -> None:
    """End a job: by SIGTERM, after a grace by SIGKILL of its whole tree, at last its guard."""
    with contextlib.suppress(ProcessLookupError):
        guard.terminate()
    if await _ended_within(guard, _GRACE_S):
        return
    _close_input(guard)
    if await _ended_within(guard, _GRACE_S):
        return
    guard.kill()
    await guard.wait()


async def _ended_within(guard: asyncio.subprocess.Process, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(guard.wait(), timeout_s)
    return guard.returncode is not None


def _close_input(guard: asyncio.subprocess.Process) -> None:
    assert guard.stdin is not None
    guard.stdin.close()

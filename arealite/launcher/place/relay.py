"""Runs one job on a machine that the launcher reaches only through a cluster's own transport (srun, a Ray actor).

    python -m arealite.launcher.place.relay [--toward HOST] [--devices I,J,...] [--leash SECONDS]

One JSON object per line. To the launcher, on stdout: `hello` (where this is, and a port that is kept free), `out`
(output, by name), `rank` (its end), `alive` every two seconds, and `exit` at last. From the launcher, on stdin: the
job, {"do": "stay"} after each sign of life, and perhaps {"do": "terminate"}. The end of stdin, whatever the reason,
ends the job with all its descendants. `RelaySeat` is the launcher's side. Invariant: a machine that says nothing for
`timeout_s` is lost, and a relay on a leash that hears nothing for as long ends its job, as the launcher is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import arealite
from arealite.api.errors import ConfigError
from arealite.launcher.place.base import Job, Listener, NodeLostError
from arealite.launcher.place.local import JobRun
from arealite.utils.network import hold_port, host_ip, port_of
from arealite.utils.processes import adopt_orphans, descendants, kill_tree

_ALIVE_S = 2.0
_KILLED_S = 5.0
"""So long a machine is heard that should have killed its job; it may be gone."""
_LINE_BYTES = 1 << 24
_JOB_S = 3600.0
"""A job that has not come by then never will."""


class RelaySeat:
    """The launcher's side of a relay."""

    def __init__(
        self,
        node: str,
        chunks: AsyncIterator[bytes],
        send: Callable[[bytes], None],
        close_input: Callable[[], None],
        *,
        timeout_s: float,
    ) -> None:
        """`chunks` are what the relay writes, `send` and `close_input` its stdin."""
        self.node = node
        self.host = self.address = ""
        self.port = 0
        self._frames = _frames(chunks)
        self._send = send
        self._close_input = close_input
        self._timeout_s = timeout_s
        self._has_job = self._is_over = False
        self._over_at = math.inf
        self._leash: asyncio.Timeout | None = None

    async def meet(self, timeout_s: float) -> None:
        """Wait until the relay has said where it is. Raises NodeLostError."""
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self._next({"hello"})
        except TimeoutError:
            raise NodeLostError(f"{self.node} must start our program within {timeout_s:g} s: got no word.") from None
        hello = frame["hello"]
        if hello["version"] != arealite.__version__:
            raise ConfigError(
                f"{self.node} must have version {arealite.__version__} of arealite, as the launcher: got "
                f"{hello['version']}. Install the same version on every machine."
            )
        self.host, self.address, self.port = hello["node"], hello["address"], hello["port"]

    async def run(self, job: Job, listener: Listener) -> int:
        """Run a job to its end and return its exit status; NodeLostError if that can't be known."""
        if self._is_over:
            raise NodeLostError(f"{job.name} on {self.node} was given up before it began")
        self._has_job = True
        self._say(dataclasses.asdict(job))
        try:
            return await self._follow(job, listener)
        finally:
            self._leash = None

    def terminate(self) -> None:
        """Send the job SIGTERM; one that was not sent yet never begins."""
        if self._has_job:
            self._say({"do": "terminate"})
        else:
            self.kill()

    def kill(self) -> None:
        """End the job with all its descendants."""
        self._is_over = True
        self._over_at = min(self._over_at, asyncio.get_running_loop().time() + _KILLED_S)
        self._close_input()
        if self._leash is not None:
            self._leash.reschedule(self._over_at)

    async def close(self) -> None:
        """Let the relay end."""
        self._close_input()

    def _say(self, message: dict[str, Any]) -> None:
        self._send(json.dumps(message).encode() + b"\n")

    async def _follow(self, job: Job, listener: Listener) -> int:
        """Hear what a job says to its end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(min(loop.time() + self._timeout_s, self._over_at)) as self._leash:
                    frame = await self._next({"out", "rank", "alive", "exit", "text"})
            except TimeoutError:
                rule = "end when it is killed" if self._is_over else f"give a sign of life every {self._timeout_s:g} s"
                raise NodeLostError(f"{job.name} on {self.node} must {rule}: got nothing") from None
            if "alive" in frame and not self._is_over:
                self._say({"do": "stay"})
            elif "out" in frame:
                listener.output(frame["out"], base64.b64decode(frame["data"]))
            elif "rank" in frame:
                listener.rank_ended(frame["rank"], frame["status"])
            elif "exit" in frame:
                return int(frame["exit"])
            elif "text" in frame:
                listener.output(job.name, frame["text"])

    async def _next(self, kinds: set[str]) -> dict[str, Any]:
        """Return the next frame of these kinds. Raises NodeLostError when there will be none."""
        async for frame in self._frames:
            if kinds & frame.keys():
                return frame
        raise NodeLostError(f"our program on {self.node} must end with a word: got its end without one")


async def _frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Cut into frames; a line that is none is someone's `text`."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            try:
                frame = json.loads(line)
            except ValueError:
                frame = None
            yield frame if isinstance(frame, dict) else {"text": line + b"\n"}


class _Speaker:
    """Writes frames to stdout. One that can't be written means that nobody listens, which stdin tells as well."""

    def output(self, name: str, data: bytes) -> None:
        self.say({"out": name, "data": base64.b64encode(data).decode()})

    def rank_ended(self, rank: int, status: int) -> None:
        self.say({"rank": rank, "status": status})

    def say(self, frame: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.buffer.write(json.dumps(frame).encode() + b"\n")
            sys.stdout.buffer.flush()


async def _relay(toward: str | None, leash_s: float) -> int:
    """Run the job that stdin names."""
    _stretch(_JOB_S)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    speaker, run = _Speaker(), JobRun()
    address = host_ip(toward) if toward else host_ip()
    with hold_port(address) as holder:
        place = {"node": socket.gethostname(), "address": address, "port": port_of(holder), "pid": os.getpid()}
        speaker.say({"hello": place | {"version": arealite.__version__}})
        first = asyncio.create_task(lines.readline())
        while not first.done():
            speaker.say({"alive": 0})
            await asyncio.wait([first], timeout=_ALIVE_S)
        if not first.result():
            return 0
        _stretch(leash_s)
        job = Job(**json.loads(first.result()))
        loop.add_signal_handler(signal.SIGTERM, run.terminate)
        tasks = [loop.create_task(_obey(lines, run, leash_s)), loop.create_task(_live(speaker))]
        try:
            status = await run.run(job, speaker)
        finally:
            for task in tasks:
                task.cancel()
    for pid in descendants(os.getpid()):  # if the guard was killed
        kill_tree(pid)
    speaker.say({"exit": status})
    return 0


def _stretch(leash_s: float) -> None:
    """Let the kernel end this process if this is not called again in time, so that the guard ends the job: even if
    nobody takes our output any more and we wait for that; 0 is for ever."""
    signal.setitimer(signal.ITIMER_REAL, leash_s)


async def _obey(lines: asyncio.StreamReader, run: JobRun, leash_s: float) -> None:
    """Take commands until there are none any more, which ends the job."""
    try:
        while (line := await lines.readline()).endswith(b"\n"):
            _stretch(leash_s)
            if json.loads(line).get("do") == "terminate":
                run.terminate()
    finally:
        run.kill()


async def _live(speaker: _Speaker) -> None:
    """Give a sign of life from time to time."""
    number = 0
    while True:
        number += 1
        speaker.say({"alive": number})
        await asyncio.sleep(_ALIVE_S)


def _choose(devices: list[str]) -> str:
    """Return the names of devices given by number; where nobody has named them, numbers are names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(devices if visible is None else [visible.split(",")[int(device)] for device in devices])


def main() -> int:
    """Parse the command line and run one job."""
    parser = argparse.ArgumentParser(prog="python -m arealite.launcher.place.relay", description=__doc__)
    parser.add_argument("--toward", metavar="HOST", help="machine that must reach this one; picks the interface")
    parser.add_argument("--devices", metavar="I,J,...", help="which of the visible GPUs the job gets; default is all")
    parser.add_argument("--leash", metavar="SECONDS", type=float, default=0.0, help="end without a word for so long")
    args = parser.parse_args()
    if args.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = _choose(args.devices.split(","))
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_relay(args.toward, args.leash))


if __name__ == "__main__":
    sys.exit(main())

"""Runs one job on a node that the launcher reaches only through a cluster's own transport (srun, a Ray actor).

One JSON object per line. To the launcher, on stdout: `hello` (where this is, its GPUs, and a port that is kept free),
`out` (output), `alive` every two seconds, and `exit` at last. From the launcher, on stdin: the job, {"do": "stay"}
after each sign of life, and perhaps {"do": "terminate"}. The end of stdin ends the job with all its descendants.
Invariant: a node that is silent for `timeout_s` is lost, and a relay whose watchdog is not rearmed in time ends its
job, as the launcher is lost.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import arealite
from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.launcher.place.base import Job, NodeLostError, Place
from arealite.launcher.place.local import JobRun
from arealite.launcher.plan.plan import Placement, Plan, setup_timeout_s
from arealite.utils.network import LOOPBACK, address_toward, hold_port, port_of
from arealite.utils.processes import adopt_orphans, descendants, kill_tree

_ALIVE_S = 2.0
_PROGRESS_S = 10.0
_LINE_BYTES = 1 << 24
_JOB_S = 3600.0  # a job that has not come by then never will


class RelaySlot:
    """The launcher's side of a relay."""

    def __init__(
        self,
        node: str,
        read: Callable[[], Awaitable[bytes]],
        send: Callable[[bytes], None],
        close_input: Callable[[], None],
        *,
        timeout_s: float,
    ) -> None:
        """`read` returns what the relay writes next, nothing at its end; `send` and `close_input` are its stdin."""
        self.node = node
        self._frames = _frames(read)
        self._send = send
        self._close_input = close_input
        self._timeout_s = timeout_s
        self._has_job = self._is_over = False

    async def meet(self) -> None:
        """Wait for the relay's first message, which says where it is. Raises NodeLostError."""
        hello = (await self._next())["hello"]
        if hello["version"] != arealite.__version__:
            raise ConfigError(
                f"{self.node} must have version {arealite.__version__} of arealite, as the launcher: got "
                f"{hello['version']}. Install the same version on every node."
            )
        self.address: str = hello["address"]
        self.port: int = hello["port"]
        self.gpus: Sequence[str] = hello["gpus"]

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        if self._is_over:
            raise NodeLostError(f"{job.name} on {self.node} was given up before it began")
        self._has_job = True
        self._write(dataclasses.asdict(job))
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    frame = await self._next()
            except TimeoutError:
                rule = f"give a sign of life every {self._timeout_s:g} s"
                raise NodeLostError(f"{job.name} on {self.node} must {rule}: got nothing") from None
            if "exit" in frame:
                return int(frame["exit"])
            if "out" in frame:
                output(base64.b64decode(frame["out"]))
            elif not self._is_over:
                self._write({"do": "stay"})

    def terminate(self) -> None:
        if self._has_job:
            self._write({"do": "terminate"})
        else:
            self.kill()

    def kill(self) -> None:
        self._is_over = True
        self._close_input()

    async def close(self) -> None:
        self._close_input()

    def _write(self, message: dict[str, Any]) -> None:
        self._send(json.dumps(message).encode() + b"\n")

    async def _next(self) -> dict[str, Any]:
        """Return the next frame. Raises NodeLostError at the end of the stream."""
        async for frame in self._frames:
            return frame
        raise NodeLostError(f"the relay on {self.node} must exit with a status: got the end of its output")


class RelayPlace(Place):
    """Nodes on each of which a relay keeps a slot."""

    _ADVICE: str  # what the user can do about nodes that don't come

    def open(self, config: BaseExperimentConfig, plan: Plan, log: Callable[[str], None]) -> None:
        self._config = config.launcher
        self._plan = plan
        self._timeout_s = setup_timeout_s(config)
        self._log = log

    async def take(self, placements: Sequence[Placement]) -> Sequence[RelaySlot]:
        """Take all slots at once, or none and TimeoutError. What is missing is logged from time to time."""
        tasks = [asyncio.create_task(self._take(one)) for one in placements]
        waiting, started = set(tasks), time.monotonic()
        try:
            while True:
                left_s = self._timeout_s - (time.monotonic() - started)
                done, waiting = await asyncio.wait(
                    waiting, timeout=max(0.0, min(_PROGRESS_S, left_s)), return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if not waiting:
                    return [task.result() for task in tasks]
                missing = [one for one, task in zip(placements, tasks, strict=True) if task in waiting]
                text, waited_s = await asyncio.to_thread(self._describe, missing), time.monotonic() - started
                if waited_s >= self._timeout_s:
                    raise TimeoutError(
                        f"all jobs must start within {self._timeout_s:g} s: still waiting for {text}. {self._ADVICE}"
                    )
                if waited_s >= _PROGRESS_S:
                    self._log(f"waiting for {text} ({waited_s:.0f} s of {self._timeout_s:g} s)")
        except BaseException:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            taken = [slot for slot in outcomes if not isinstance(slot, BaseException)]
            await asyncio.gather(*(slot.close() for slot in taken), return_exceptions=True)
            raise

    async def _take(self, placement: Placement) -> RelaySlot:
        """Start a relay and meet it."""
        raise NotImplementedError

    def _describe(self, missing: Sequence[Placement]) -> str:
        """Say what the missing slots wait for."""
        raise NotImplementedError


async def _frames(read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[dict[str, Any]]:
    """Cut into frames; any other line, e.g. of a container, is left out."""
    rest = b""
    while chunk := await read():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b'{"'):
                yield json.loads(line)


def _write(frame: dict[str, Any]) -> None:
    """Write a frame to stdout. A launcher that is gone has closed stdin as well."""
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(json.dumps(frame).encode() + b"\n")
        sys.stdout.buffer.flush()


async def _relay(toward: str, gpus: list[str], watchdog_s: float) -> int:
    """Run the job that stdin names."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    run, named = JobRun(), loop.create_future()
    loop.add_signal_handler(signal.SIGTERM, run.terminate)
    address = LOOPBACK if toward == LOOPBACK else address_toward(toward)
    with hold_port() as holder:
        slot = {"address": address, "port": port_of(holder), "gpus": gpus}
        _write({"hello": slot | {"version": arealite.__version__}})
        tasks = [loop.create_task(_live()), loop.create_task(_obey(lines, run, named, watchdog_s))]
        if (job := await named) is None:
            return 0
        status = await run.run(job, lambda data: _write({"out": base64.b64encode(data).decode()}))
        for task in tasks:
            task.cancel()
    for pid in descendants(os.getpid()):  # if the guard was killed
        kill_tree(pid)
    _write({"exit": status})
    return 0


async def _obey(lines: asyncio.StreamReader, run: JobRun, named: asyncio.Future[Job | None], watchdog_s: float) -> None:
    """Take the job and commands until stdin ends, which ends the job. Calls of a Ray actor may overtake each other."""
    _rearm(_JOB_S)
    try:
        while (line := await lines.readline()).endswith(b"\n"):
            _rearm(watchdog_s)
            message = json.loads(line)
            if "do" not in message:
                named.set_result(Job(**message))
            elif message["do"] == "terminate":
                run.terminate()
    finally:
        run.kill()
        if not named.done():
            named.set_result(None)


def _rearm(watchdog_s: float) -> None:
    """Rearm the watchdog: the kernel kills this process unless called again within `watchdog_s` (0: never), and the
    guard then ends the job, even if we block in a write to a full pipe."""
    signal.setitimer(signal.ITIMER_REAL, watchdog_s)


async def _live() -> None:
    while True:
        _write({"alive": 0})
        await asyncio.sleep(_ALIVE_S)


def _gpus(devices: str | None) -> list[str]:
    """Return the names of GPUs given by number, of all that are visible without; where none has a name, numbers are
    names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in (visible or "").split(",") if name]
    if devices is None:
        return names
    numbers = [number for number in devices.split(",") if number]
    return numbers if visible is None else [names[int(number)] for number in numbers]


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m arealite.launcher.place.relay", description="Run one job.")
    parser.add_argument("--toward", metavar="HOST", required=True, help="node that must reach this one")
    parser.add_argument("--devices", metavar="I,J,...", help="which of the visible GPUs the slot has; default is all")
    parser.add_argument("--watchdog", metavar="SECONDS", type=float, default=0.0, help="0 trusts a silent launcher")
    args = parser.parse_args()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_relay(args.toward, _gpus(args.devices), args.watchdog))


if __name__ == "__main__":
    sys.exit(main())

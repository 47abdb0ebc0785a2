"""Runs the jobs of a run until a failure, a signal or the trainer's end, then ends all of them within seconds.

Where a job runs is its slot's business (see `place`). Servers and trainer start together, because both take seconds to
import what they need. A server that ends before it was ready ends the run; one that ends later is started again, while
the others keep serving. One event loop runs it all; only timeouts and the stall watch are timed, everything else is an
event.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.launcher.place.base import Job, NodeLostError, Place, Slot
from arealite.launcher.plan.plan import Placement
from arealite.launcher.supervise.console import Console, Output
from arealite.utils.heartbeat import FOLDER_VARIABLE, NAME_VARIABLE, PERIOD_S
from arealite.utils.processes import adopt_orphans, descendants, describe_exit, kill_tree
from arealite.utils.registry import Registry
from arealite.watchdog.evidence import read_progress
from arealite.watchdog.stall import StallPolicy, StallWatch, forget_progress

CONFIG_FAILED = 2
SERVER_FAILED = 3
STALLED = 4
NODE_LOST = 5
_GRACE_S = 5.0
_CLEAN_UP_S = 15.0
_WORD_S = 10.0
"""Between two words on what is waited for."""
_REFUSAL = re.compile(r"(\[rank\d+\]: )?arealite\.api\.errors\.(Config|Checkpoint|Ledger)Error: ")
_LOST_PEER = re.compile(r"Connection (reset|closed) by peer|Broken pipe|gloo/transport|NCCL communicator was aborted")
_CAUSE_S = 5.0
"""How long a rank that has lost its peer is not blamed, as the peer may still be writing its traceback."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class ExitReason:
    """Why the run ended: the launcher's exit status, and whose output explains it."""

    status: int
    reason: str
    output: Output | None = None

    @property
    def is_failure(self) -> bool:
        return self.output is not None or self.status in (CONFIG_FAILED, SERVER_FAILED, STALLED, NODE_LOST)

    @property
    def is_refusal(self) -> bool:
        """Whether the program said that it can't run as it is, so that starting it again would end alike."""
        return self.output is not None and any(_REFUSAL.match(line) for line in self.output.tail)

    @property
    def is_consequence(self) -> bool:
        """Whether a rank failed because its connection to another one ended."""
        return self.output is not None and any(_LOST_PEER.search(line) for line in self.output.tail)


@dataclass(frozen=True)
class ServerPolicy:
    """What is expected of servers."""

    setup_timeout_s: float
    restarts: int
    registry: Registry
    """Where they register, under the names of their jobs."""
    publish_progress: bool
    """Whether they tell a stall watch what they do."""
    invitation: str | None
    """What is said, with their addresses, when all are ready and there is no trainer to use them."""


class Supervisor:
    """The jobs of one run, their outputs and the console. Leaving its context ends everything and tells why."""

    def __init__(self, *, log_folder: Path, stall: StallPolicy) -> None:
        self.console = Console()
        self._log_folder = log_folder
        self._stall = stall
        forget_progress(log_folder)
        self._log = Output("launcher", log_folder / "launcher.log", self.console)
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[str, Output] = {}
        self._slots: dict[str, Slot] = {}
        """Of the jobs that run."""
        self._ended: dict[str, asyncio.Event] = {}
        self._closing: list[asyncio.Task[None]] = []
        """Of slots whose jobs have ended."""
        self._addresses: dict[str, str] = dict(stall.foreign_servers)
        """Of servers that were ready once."""
        self._server_names: list[str] = []
        self._expected: list[str] = []
        """Names of the processes that will tell the stall watch what they do."""
        self._num_output_bytes = 0
        self._exit_reasons: list[asyncio.Future[ExitReason]] = []
        self._before = set(descendants(os.getpid()))
        self._adopted_before = adopt_orphans()
        self._exit_reason: ExitReason | None = None
        self._signal: asyncio.Future[int] = self._loop.create_future()
        self._watch(self._signalled())
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._loop.add_signal_handler(number, self._take_signal, number)

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stop()
        forget_progress(self._log_folder)
        for output in self._outputs.values():
            output.close()
        if self._exit_reason is not None and self._exit_reason.output is not None:
            self._explain(self._exit_reason, self._exit_reason.output)
        self._log.close()
        self.console.close()

    def log(self, text: str) -> None:
        """Write a line to the console and to launcher.log."""
        self._log.feed(f"{text}\n".encode())

    # Starting

    async def take_slots(self, place: Place, placements: Sequence[Placement]) -> list[Slot] | None:
        """Return the slots of all jobs; None if the run ended meanwhile, or has to because there are none."""
        taking = self._loop.create_task(place.take(placements))
        waits: list[asyncio.Future[Any]] = [taking, *self._exit_reasons]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            await _cancelled([taking])
            return None
        try:
            return taking.result()
        except (NodeLostError, TimeoutError, ConfigError) as error:
            status = CONFIG_FAILED if isinstance(error, ConfigError) else NODE_LOST
            self._exit_reasons.append(self._loop.create_future())
            self._exit_reasons[-1].set_result(ExitReason(status, f"{type(error).__name__}: {error}"))
            return None

    def start_servers(
        self,
        place: Place,
        placements: Sequence[Placement],
        slots: Sequence[Slot],
        describe: Callable[[Placement, Slot], Job],
        policy: ServerPolicy,
    ) -> None:
        """Start servers; each must become ready in time, and is started again when it ends after that."""
        if policy.publish_progress:
            self._expected += [placement.name for placement in placements]
        self._server_names = [placement.name for placement in placements]
        for placement, slot in zip(placements, slots, strict=True):
            policy.registry.remove(placement.name)  # what a killed server of the attempt before has left
            self._watch(self._serve(place, placement, slot, describe, policy))

    def start_trainer(self, jobs: Sequence[tuple[Slot, Job]]) -> None:
        """Start the ranks of the trainer. The first one that fails ends the run, and so does the end of all. From now
        on nothing may stand still: without a trainer, idle servers may."""
        self._expected += [job.name for _, job in jobs]
        self._watch(self._train(jobs))
        if self.console.is_terminal:
            self._watch(self._draw())
        self._watch(self._stalled())

    async def wait(self) -> int:
        """Wait for what ends the run and return the launcher's exit status. A server's end explains a failure of the
        trainer, so it is told first; the user's signal explains everything."""
        await asyncio.wait(self._exit_reasons, return_when=asyncio.FIRST_COMPLETED)
        if all(reason.is_failure and reason.status != SERVER_FAILED for reason in self._told()):
            await asyncio.wait([end for end in self._exit_reasons if not end.done()], timeout=0.5)
        self._exit_reason = min(self._told(), key=lambda reason: (reason.is_failure, reason.status != SERVER_FAILED))
        if self._exit_reason.status != 0:
            self.log(f"{self._exit_reason.reason}: stopping everything")
        return self._exit_reason.status

    @property
    def exit_reason(self) -> ExitReason:
        """Why the run ended; a signal that came while everything was being stopped is the user's last word."""
        if self._signal.done():
            return _signalled(self._signal.result())
        assert self._exit_reason is not None, "only a run that has ended knows why"
        return self._exit_reason

    # Watching

    async def _serve(
        self,
        place: Place,
        placement: Placement,
        slot: Slot,
        describe: Callable[[Placement, Slot], Job],
        policy: ServerPolicy,
    ) -> ExitReason:
        """Run a server, again when it ends after it was ready, and return what ends the run."""
        name, was_ready = placement.name, False
        for restart in itertools.count(1):
            running = self._loop.create_task(self._run(slot, describe(placement, slot)))
            loading = self._loop.create_task(self._becomes_ready(name, policy))
            try:
                await asyncio.wait({running, loading}, return_when=asyncio.FIRST_COMPLETED)
                was_ready = was_ready or (loading.done() and loading.result())
                if loading.done() and not loading.result():
                    reason = f"{name} was not ready within {policy.setup_timeout_s:g} s"
                    return ExitReason(SERVER_FAILED, reason, self._output(name))
                ended = f"{name} ended with {describe_exit(await running)}"
                status = SERVER_FAILED
            except NodeLostError as error:
                ended, status = str(error), NODE_LOST
            finally:
                running.cancel()
                loading.cancel()
            policy.registry.remove(name)
            if not was_ready or restart > policy.restarts:
                return ExitReason(status, ended, self._output(name))
            self.log(f"{ended}; starting it again ({restart} of {policy.restarts})")
            try:
                (slot,) = await place.take([placement])
            except (NodeLostError, TimeoutError, ConfigError) as error:
                return ExitReason(status, f"{name} could not be started again: {error}")
        raise AssertionError("servers end")

    async def _becomes_ready(self, name: str, policy: ServerPolicy) -> bool:
        """Wait until a server registers as ready, and log what it does meanwhile; False if it takes too long."""
        started, next_word = time.monotonic(), time.monotonic() + _WORD_S
        view = await policy.registry.watch()
        while (record := view.servers.get(name)) is None or record.state != "ready":
            now = time.monotonic()
            if now - started >= policy.setup_timeout_s:
                return False
            if now >= next_word:
                next_word = now + _WORD_S
                doing = "it has not registered yet" if record is None else record.detail
                self.log(f"waiting for {name} ({now - started:.0f} s of {policy.setup_timeout_s:g} s): {doing}")
            due = min(next_word, started + policy.setup_timeout_s)
            view = await policy.registry.watch(view.moment, max(0.0, due - now))
        self._addresses[name] = record.address
        self.log(f"{name} is ready at {record.address} after {time.monotonic() - started:.1f} s")
        addresses = [self._addresses.get(name, "") for name in self._server_names]
        if policy.invitation is not None and all(addresses):
            self.log(policy.invitation + ",".join(addresses))
        return True

    async def _train(self, jobs: Sequence[tuple[Slot, Job]]) -> ExitReason:
        """Run all ranks; the first failure that no other rank caused counts."""

        async def run(slot: Slot, job: Job) -> ExitReason | None:
            try:
                status = await self._run(slot, job)
            except NodeLostError as error:
                return ExitReason(NODE_LOST, str(error))
            reason = f"{job.name} failed with {describe_exit(status)}"
            return ExitReason(status, reason, self._output(job.name)) if status != 0 else None

        ranks = [self._loop.create_task(run(slot, job)) for slot, job in jobs]
        try:
            first, running = None, set(ranks)
            while running:
                timeout_s = None if first is None else _CAUSE_S
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for failure in filter(None, (rank.result() for rank in done)):
                    if not failure.is_consequence:
                        return failure
                    first = first or failure
                if not done:
                    break
            return first or ExitReason(0, "the trainer is done")
        finally:
            for task in ranks:
                task.cancel()

    async def _draw(self) -> ExitReason:
        """Draw the progress that rank 0 publishes."""
        while True:
            for progress in read_progress(self._log_folder / "progress", "trainer-0").values():
                if progress.status:
                    self.console.show_progress(**progress.status)
            await asyncio.sleep(PERIOD_S)

    async def _stalled(self) -> ExitReason:
        """Return when the run stalls and may not continue."""
        watch = StallWatch(
            policy=self._stall,
            logs=self._log_folder,
            servers=self._addresses,
            expected=self._expected,
            count_output=lambda: self._num_output_bytes,
        )
        while True:
            for line in await watch.next_stall():
                self.log(line)
            if self._stall.on_stall == "stop":
                return ExitReason(STALLED, "the run is stalled")
            await watch.movement()
            self.log("the run moves again")

    async def _signalled(self) -> ExitReason:
        return _signalled(await asyncio.shield(self._signal))

    async def _run(self, slot: Slot, job: Job) -> int:
        """Run a job on a slot to its end; a cancelled one is ended by `_stop`."""
        env = job.env | {FOLDER_VARIABLE: str(self._log_folder.absolute() / "progress"), NAME_VARIABLE: job.name}
        output = self._output(job.name)
        ended = self._ended[job.name] = asyncio.Event()
        self._slots[job.name] = slot

        def take(data: bytes) -> None:
            self._num_output_bytes += len(data)
            output.feed(data)

        run = self._loop.create_task(slot.run(dataclasses.replace(job, env=env), take))

        def note_end(_: object) -> None:
            del self._slots[job.name]
            ended.set()

        run.add_done_callback(note_end)
        try:
            return await asyncio.shield(run)
        finally:
            if run.done():
                self._closing.append(self._loop.create_task(slot.close()))

    def _watch(self, reason: Coroutine[None, None, ExitReason]) -> None:
        self._exit_reasons.append(self._loop.create_task(reason))

    def _told(self) -> list[ExitReason]:
        return [end.result() for end in self._exit_reasons if end.done()]

    def _output(self, name: str) -> Output:
        """Return the output of a process; of servers only warnings are shown."""
        if name not in self._outputs:
            self._outputs[name] = Output(
                name,
                self._log_folder / f"{name}.log",
                self.console,
                show="warnings" if name.startswith("server") else "all",
                is_foreground=name == "trainer-0",
            )
        return self._outputs[name]

    # Stopping

    def _take_signal(self, number: int) -> None:
        """End the run at the first signal, and without grace at the second."""
        if not self._signal.done():
            self._signal.set_result(number)
        else:
            for slot in self._slots.values():
                slot.kill()

    async def _stop(self) -> None:
        """End all jobs: by SIGTERM, after a grace by SIGKILL; then what they left behind if a guard was killed."""
        for task in self._exit_reasons:
            task.cancel()
        slots = dict(self._slots)
        for slot in slots.values():
            slot.terminate()
        if not await self._all_end(slots):
            for name in slots.keys() & self._slots.keys():
                slots[name].kill()
            await self._all_end(slots)
        await _cancelled(self._exit_reasons)
        closing = [*self._closing, *(slot.close() for slot in slots.values())]
        await asyncio.gather(*closing, return_exceptions=True)  # they have deadlines of their own
        for pid in set(descendants(os.getpid())) - self._before:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        adopt_orphans(self._adopted_before)

    async def _all_end(self, slots: dict[str, Slot]) -> bool:
        """Wait a grace for jobs to end, and tell whether all have."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                for name in slots:
                    await self._ended[name].wait()
        return not self._slots.keys() & slots.keys()

    def _explain(self, reason: ExitReason, output: Output) -> None:
        last = f"its last {len(output.tail)} lines:" if output.tail else "it wrote nothing."
        self.log(f"{reason.reason}; {last}")
        for line in output.tail:
            self.console.line(f"    {line}")
        self.log(f"its whole log: {output.path}")


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and let them clean up."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_CLEAN_UP_S)


def _signalled(number: int) -> ExitReason:
    return ExitReason(128 + number, f"received {signal.Signals(number).name}")

"""Runs the jobs of a run until a failure, a signal or the trainer's end, then ends all of them within seconds.

Where a job runs is its slot's business (see `place`). A server that ends before it was ready ends the run; one that
ends later is started again, while the others keep serving.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
_SERVER_END_S = 0.5
"""How long a server's end is waited for, which may be why the trainer failed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pause_s(num_restarts: int) -> float:
    """Return how long to wait before a restart, of several in a row."""
    return min(60.0, 2.0 ** (num_restarts - 1)) if num_restarts else 0.0


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
    """What is expected of servers, and how they are started."""

    place: Place
    """Gives slots for restarts."""
    describe: Callable[[Placement, Slot], Job]
    setup_timeout_s: float
    restarts: int
    """How often in a row, without progress."""
    progress: Callable[[], int]
    """A number that grows when the run has got on, after which a server may start as often again."""
    registry: Registry
    """Where they register, under the names of their jobs."""
    publish_progress: bool
    """Whether they tell a stall watch what they do."""
    invitation: str | None
    """What is said, with their addresses, when all are ready and there is no trainer to use them."""


class Supervisor:
    """The jobs of one run, their outputs and the console. Leaving its context ends everything and tells why."""

    def __init__(self, *, log_folder: Path, stall: StallPolicy, env: Mapping[str, str]) -> None:
        """`env` is added to the environment of every job."""
        self.console = Console()
        self._log_folder = log_folder
        self._stall = stall
        self._env = env
        forget_progress(log_folder)
        self._log = Output("launcher", log_folder / "launcher.log", self.console)
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[str, Output] = {}
        self._running: dict[asyncio.Task[int], Slot] = {}
        """The jobs that run, and where."""
        self._closing: list[asyncio.Task[None]] = []
        """Of slots whose jobs have ended."""
        self._addresses: dict[str, str] = dict(stall.foreign_servers)
        """Of servers that were ready once."""
        self._server_names: list[str] = []
        self._expected: list[str] = []
        """Names of the processes that will tell the stall watch what they do."""
        self._num_output_bytes = 0
        self._watches: list[asyncio.Future[ExitReason]] = []
        """Each ends with a reason to end the run."""
        self._before = set(descendants(os.getpid()))
        self._adopted_before = adopt_orphans()
        self._exit_reason: ExitReason | None = None
        self._signal: asyncio.Future[ExitReason] = self._loop.create_future()
        """Done by the first signal of the user."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._loop.add_signal_handler(number, self._take_signal, number)

    async def __aenter__(self) -> Self:
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

    async def pause(self, seconds: float) -> None:
        """Wait, unless a signal ends the run."""
        await asyncio.wait([self._signal], timeout=seconds)

    async def take_slots(self, place: Place, placements: Sequence[Placement]) -> Sequence[Slot] | None:
        """Return the slots of all jobs; None if the run ended meanwhile, or has to because there are none."""
        taking = self._loop.create_task(place.take(placements))
        either: list[asyncio.Future[Any]] = [taking, self._signal]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            await asyncio.wait([taking], timeout=_CLEAN_UP_S)
            return None
        try:
            return taking.result()
        except (NodeLostError, TimeoutError, ConfigError) as error:
            status = CONFIG_FAILED if isinstance(error, ConfigError) else NODE_LOST
            self._watches.append(self._loop.create_future())
            self._watches[-1].set_result(ExitReason(status, f"{type(error).__name__}: {error}"))
            return None

    def start_servers(self, servers: Sequence[tuple[Placement, Slot]], policy: ServerPolicy) -> None:
        """Start servers; each must become ready in time, and is started again when it ends after that."""
        self._server_names = [placement.name for placement, _ in servers]
        if policy.publish_progress:
            self._expected += self._server_names
        for placement, slot in servers:
            policy.registry.remove(placement.name)  # what a killed server of the attempt before has left
            self._watch(self._serve(placement, slot, policy))

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
        ends = [self._signal, *self._watches]
        done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if all(end.result().is_failure and end.result().status != SERVER_FAILED for end in done):
            done |= (await asyncio.wait(others, timeout=_SERVER_END_S))[0]
        reasons = [end.result() for end in ends if end in done]
        self._exit_reason = min(reasons, key=lambda reason: (reason.is_failure, reason.status != SERVER_FAILED))
        if self._exit_reason.status != 0:
            self.log(f"{self._exit_reason.reason}: stopping everything")
        return self._exit_reason.status

    @property
    def exit_reason(self) -> ExitReason:
        """Why the run ended; a signal that came while everything was being stopped is the user's last word."""
        if self._signal.done():
            return self._signal.result()
        assert self._exit_reason is not None, "only a run that has ended knows why"
        return self._exit_reason

    # Watching

    async def _serve(self, placement: Placement, slot: Slot, policy: ServerPolicy) -> ExitReason:
        """Run a server, again when it ends after it was ready, and return what ends the run."""
        name, was_ready = placement.name, False
        num_restarts, progress = 0, policy.progress()
        while True:
            running = self._loop.create_task(self._run(slot, policy.describe(placement, slot)))
            loading = self._loop.create_task(self._becomes_ready(name, policy))
            try:
                await asyncio.wait({running, loading}, return_when=asyncio.FIRST_COMPLETED)
                was_ready = was_ready or (loading.done() and loading.result())
                status = SERVER_FAILED
                if loading.done() and not loading.result():
                    ended = f"{name} was not ready within {policy.setup_timeout_s:g} s"
                    slot.kill()
                else:
                    ended = f"{name} ended with {describe_exit(await running)}"
            except NodeLostError as error:
                ended, status = str(error), NODE_LOST
            finally:
                running.cancel()
                loading.cancel()
            policy.registry.remove(name)
            if policy.progress() > progress:
                num_restarts, progress = 0, policy.progress()
            if not was_ready or num_restarts == policy.restarts:
                break
            num_restarts += 1
            self.log(f"{ended}; starting it again ({num_restarts} of {policy.restarts})")
            await asyncio.sleep(pause_s(num_restarts))
            try:
                (slot,) = await policy.place.take([placement])
            except (NodeLostError, TimeoutError, ConfigError) as error:
                return ExitReason(status, f"{name} could not be started again: {error}")
        if was_ready:
            self._server_names.remove(name)
            if self._server_names or policy.registry.servers:
                self.log(f"{ended}; it is left out, as others serve")
                self._addresses.pop(name, None)
                if name in self._expected:
                    self._expected.remove(name)
                await self._loop.create_future()
        return ExitReason(status, ended, self._output(name))

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
                if status := progress.status:
                    self.console.show_progress(status["step"], status["total_steps"], status["phase"])
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

    async def _run(self, slot: Slot, job: Job) -> int:
        """Run a job on a slot to its end; a cancelled one is ended by `_stop`."""
        progress = {FOLDER_VARIABLE: str(self._log_folder.absolute() / "progress"), NAME_VARIABLE: job.name}
        output = self._output(job.name)

        def take(data: bytes) -> None:
            self._num_output_bytes += len(data)
            output.feed(data)

        job = dataclasses.replace(job, env={**self._env, **job.env, **progress})
        run = self._loop.create_task(slot.run(job, take))
        self._running[run] = slot
        run.add_done_callback(self._running.pop)
        try:
            return await asyncio.shield(run)
        finally:
            if run.done():
                self._closing.append(self._loop.create_task(slot.close()))

    def _watch(self, reason: Coroutine[None, None, ExitReason]) -> None:
        self._watches.append(self._loop.create_task(reason))

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
            self._signal.set_result(ExitReason(128 + number, f"received {signal.Signals(number).name}"))
        else:
            for slot in self._running.values():
                slot.kill()

    async def _stop(self) -> None:
        """End all jobs: by SIGTERM, after a grace by SIGKILL; then what they left behind if a guard was killed."""
        for task in self._watches:
            task.cancel()
        running = dict(self._running)
        for slot in running.values():
            slot.terminate()
        if running:
            _, stubborn = await asyncio.wait(running, timeout=_GRACE_S)
            for run in stubborn:
                running[run].kill()
            if stubborn:
                await asyncio.wait(stubborn, timeout=_GRACE_S)
        if self._watches:
            await asyncio.wait(self._watches, timeout=_CLEAN_UP_S)
        closing = [*self._closing, *(slot.close() for slot in running.values())]
        await asyncio.gather(*closing, return_exceptions=True)  # they have deadlines of their own
        for pid in set(descendants(os.getpid())) - self._before:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        adopt_orphans(self._adopted_before)

    def _explain(self, reason: ExitReason, output: Output) -> None:
        last = f"its last {len(output.tail)} lines:" if output.tail else "it wrote nothing."
        self.log(f"{reason.reason}; {last}")
        for line in output.tail:
            self.console.line(f"    {line}")
        self.log(f"its whole log: {output.path}")

"""Runs the jobs of a run until a failure, a signal or the trainer's end, then ends all of them within seconds.

Where a job runs is its slot's business (see `place`). A server that ends before it was ready ends the run; one that
ends later is started again, while the others keep serving.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arealite.api.errors import ConfigError
from arealite.launcher.place.base import Job, NodeLostError, Place, Slot
from arealite.launcher.plan.jobs import server_job, trainer_job
from arealite.launcher.plan.plan import Placement, Run, setup_timeout_s, trains
from arealite.launcher.plan.servers import foreign_servers
from arealite.launcher.supervise.console import Console, Output
from arealite.utils import trace
from arealite.utils.environment import REGISTRY_VARIABLE, SECRET_VARIABLE, SERVER_ADDRS_VARIABLE
from arealite.utils.files import read_jsonl
from arealite.utils.heartbeat import FOLDER_VARIABLE, NAME_VARIABLE, PERIOD_S
from arealite.utils.processes import adopt_orphans, descendants, describe_exit, kill_tree, num_oom_kills
from arealite.utils.registry import Registry
from arealite.watchdog.evidence import read_heartbeats
from arealite.watchdog.stall import StallWatch

CONFIG_FAILED = 2
SERVER_FAILED = 3
STALLED = 4
NODE_LOST = 5
_NO_MEMORY = "memory ran out (the node's, or what its container or job may use)"
_GRACE_S = 5.0
_CLEAN_UP_S = 15.0
_WORD_S = 10.0  # between two words on what is waited for
_REFUSAL = re.compile(
    r"(\[rank\d+\]: )?arealite\.api\.errors\.(Config|Checkpoint|Ledger)Error: |.* ERROR arealite\.server: can't serve "
)
_LOST_PEER = re.compile(r"Connection (reset|closed) by peer|Broken pipe|gloo/transport|NCCL communicator was aborted")
_CAUSE_S = 5.0  # how long a rank that has lost its peer is not blamed, as the peer may still be writing its traceback
_SERVER_END_S = 0.5  # how long a server's end is waited for, which may be why the trainer failed


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


class Supervisor:
    """One attempt of a run: its jobs, their outputs and the console. Servers register in the run's registry."""

    def __init__(self, run: Run, place: Place, registry: Registry, secret: str) -> None:
        self._run = run
        self._config = run.config
        self._plan = run.plan
        self._place = place
        self._registry = registry
        self._secret = secret
        self._logs = run.folder.logs
        shutil.rmtree(self._logs / "progress", ignore_errors=True)
        self._console = Console()
        self._log = Output("launcher", self._logs / "launcher.log", self._console)
        self._num_oom_kills = num_oom_kills()
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[str, Output] = {}
        self._running: dict[asyncio.Task[int], Slot] = {}  # the jobs that run, and where
        self._slots_of_ranks: Sequence[Slot] = ()
        self._closing: list[asyncio.Task[None]] = []  # of slots whose jobs have ended
        self._addresses = {address: address for address in foreign_servers(run.config)}  # of servers once ready
        self._server_names = [one.name for one in run.plan.servers]
        self._are_servers_ready = asyncio.Event()
        publishing = (
            run.plan.placements if run.plan.servers and run.config.server_kind.is_embedded else run.plan.trainers
        )
        self._expected = [one.name for one in publishing]  # will tell the stall watch what they do
        self._num_output_bytes = 0
        self._watches: list[asyncio.Future[ExitReason]] = []  # each ends with a reason to end the run
        self._before = set(descendants(os.getpid()))
        self._adopted_before = adopt_orphans()
        self._signal: asyncio.Future[ExitReason] = self._loop.create_future()  # done by the first signal of the user
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._loop.add_signal_handler(number, self._take_signal, number)

    async def supervise(self, restart: str | None, delay_s: float) -> ExitReason:
        """Start everything after a delay, end it when something ends the run, and return what did.

        `restart` tells why this is not the first attempt. A signal while everything is being stopped counts as well.
        """
        try:
            try:
                self._say(restart or f"{self._config.allocation_mode}; logs in {self._logs}")
                await asyncio.wait([self._signal], timeout=delay_s)
                self._place.open(self._config, self._plan, self._say)
                slots = await self._take_slots()
                if slots is not None:
                    self._start(slots, is_restart=restart is not None)
                reason = await self._first_end()
                if self._signal.done() and reason is self._signal.result():
                    await self._end_training()
            finally:
                await self._stop()
            if (output := reason.output) is not None:
                if not output.tail:
                    self._say(f"{reason.reason}; it wrote nothing")
                elif output.unseen:
                    self._say(f"{reason.reason}; its last {len(output.unseen)} lines that are not above:")
                for line in output.unseen:
                    self._console.line(f"    {line}")
                self._say(f"the whole log of {output.name}: {output.path}")
            if self._signal.done() and self._plan.trainers:
                self._say_what_is_kept()
        finally:
            self._log.close()
            self._console.close()
            await self._place.close()
        return self.signalled or reason

    @property
    def signalled(self) -> ExitReason | None:
        """The user's first signal, also one that came after `supervise`."""
        return self._signal.result() if self._signal.done() else None

    def _say(self, text: str) -> None:
        """Write a line to the console and to launcher.log."""
        self._log.feed(f"{text}\n".encode())

    # Starting

    async def _take_slots(self) -> Mapping[Placement, Slot] | None:
        """Return the slots of all jobs; None if the run ended meanwhile, or has to because there are none."""
        taking = self._loop.create_task(self._place.take(self._plan.placements))
        either: list[asyncio.Future[Any]] = [taking, self._signal]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            taking.cancel()
            await asyncio.wait([taking], timeout=_CLEAN_UP_S)
            return None
        try:
            return dict(zip(self._plan.placements, taking.result(), strict=True))
        except (NodeLostError, TimeoutError, ConfigError) as error:
            status = CONFIG_FAILED if isinstance(error, ConfigError) else NODE_LOST
            self._watches.append(self._loop.create_future())
            self._watches[-1].set_result(ExitReason(status, f"{type(error).__name__}: {error}"))
            return None

    def _start(self, slots: Mapping[Placement, Slot], *, is_restart: bool) -> None:
        """Start all jobs. With a trainer nothing may stand still; idle servers may without one."""
        for one in self._plan.servers:
            self._registry.remove(one.name)  # what a killed server of the attempt before has left
            self._watch(self._serve(one, slots[one]))
        if self._plan.trainers:
            self._slots_of_ranks = [slots[one] for one in self._plan.trainers]
            self._watch(self._train(slots, is_restart=is_restart))
            if self._console.is_terminal:
                self._watch(self._draw())
            self._watch(self._stalled())

    async def _first_end(self) -> ExitReason:
        """Wait for what ends the run. A server's end explains a failure of the trainer, so it is told first; the user's
        signal explains everything."""
        ends = [self._signal, *self._watches]
        done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if all(end.result().is_failure and end.result().status != SERVER_FAILED for end in done):
            done |= (await asyncio.wait(others, timeout=_SERVER_END_S))[0]
        reasons = [end.result() for end in ends if end in done]
        first = min(reasons, key=lambda reason: (reason.is_failure, reason.status != SERVER_FAILED))
        if first.status != 0:
            self._say(f"{first.reason}: stopping everything")
        return first

    # Watching

    async def _serve(self, placement: Placement, slot: Slot) -> ExitReason:
        """Run a server, again if it ends once ready and no rank may use its memory, and return what ends the run."""
        name, was_ready = placement.name, False
        num_restarts, progress = 0, self._run.folder.newest_checkpoint
        max_restarts = 0 if self._plan.takes_turns else self._config.launcher.server_restarts
        while True:
            job = server_job(self._config, placement, slot.address, slot.gpus)
            running = self._loop.create_task(self._run_job(slot, job))
            loading = self._loop.create_task(self._becomes_ready(name))
            try:
                status = SERVER_FAILED
                await asyncio.wait({running, loading}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    loading.result()
                    was_ready = True
                ended = f"{name} ended with {self._describe(await running)}"
            except TimeoutError:
                ended = f"{name} was not ready within {setup_timeout_s(self._config):g} s"
                slot.kill()
                with contextlib.suppress(NodeLostError, TimeoutError):  # its slot must be given back for the next one
                    await asyncio.wait_for(running, _CLEAN_UP_S)
            except NodeLostError as error:
                ended, status = str(error), NODE_LOST
            finally:
                running.cancel()
                loading.cancel()
            self._registry.remove(name)
            if self._run.folder.newest_checkpoint > progress:
                num_restarts, progress = 0, self._run.folder.newest_checkpoint
            if not was_ready or num_restarts == max_restarts:
                break
            num_restarts += 1
            self._say(f"{ended}; starting it again ({num_restarts} of {max_restarts})")
            await asyncio.sleep(pause_s(num_restarts))
            try:
                (slot,) = await self._place.take([placement])
            except (NodeLostError, TimeoutError, ConfigError) as error:
                return ExitReason(status, f"{name} could not be started again: {error}")
        if was_ready:
            self._server_names.remove(name)
            if self._server_names or self._registry.servers:
                self._say(f"{ended}; it is left out, as others serve")
                self._addresses.pop(name, None)
                if name in self._expected:
                    self._expected.remove(name)
                await self._loop.create_future()
        return ExitReason(status, ended, self._output(name))

    async def _becomes_ready(self, name: str) -> None:
        """Wait until a server registers as ready, and log what it does meanwhile. Raises TimeoutError."""
        started, next_word = time.monotonic(), time.monotonic() + _WORD_S
        timeout_s = setup_timeout_s(self._config)
        async with asyncio.timeout(timeout_s):
            view = await self._registry.watch()
            while (record := view.servers.get(name)) is None or record.state != "ready":
                if (now := time.monotonic()) >= next_word:
                    next_word = now + _WORD_S
                    doing = "it has not registered yet" if record is None else record.detail
                    self._say(f"waiting for {name} ({now - started:.0f} s of {timeout_s:g} s): {doing}")
                view = await self._registry.watch(view.moment, next_word - now)
        self._addresses[name] = record.address
        self._say(f"{name} is ready at {record.address} after {time.monotonic() - started:.1f} s")
        addresses = [self._addresses.get(name, "") for name in self._server_names]
        if all(addresses):
            self._are_servers_ready.set()
        if not self._plan.trainers and all(addresses):
            secret = f"{SECRET_VARIABLE}=$(cat {self._run.folder.secret})"
            self._say(f"servers only, until Ctrl-C: export {secret} {SERVER_ADDRS_VARIABLE}={','.join(addresses)}")

    async def _train(self, slots: Mapping[Placement, Slot], *, is_restart: bool) -> ExitReason:
        """Run all ranks; the first failure that no other rank caused counts."""
        if self._plan.takes_turns:  # servers measure how much memory is free, and whoever is late ends the run
            await self._are_servers_ready.wait()
        first_slot = slots[self._plan.trainers[0]]
        master = first_slot.address, first_slot.port

        async def run(rank: Placement) -> ExitReason | None:
            # NCCL links only GPUs that both sides see, so a rank sees those of its whole node; LOCAL_RANK picks one.
            gpus = [gpu for beside in self._plan.ranks_on(rank.node) for gpu in slots[beside].gpus]
            job = trainer_job(self._run, rank, gpus, master=master, is_restart=is_restart)
            try:
                status = await self._run_job(slots[rank], job)
            except NodeLostError as error:
                return ExitReason(NODE_LOST, str(error))
            reason = f"{job.name} failed with {self._describe(status)}"
            return ExitReason(status, reason, self._output(job.name)) if status != 0 else None

        ranks = [self._loop.create_task(run(one)) for one in self._plan.trainers]
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
        while True:
            for process in read_heartbeats(self._logs / "progress", "trainer-0"):
                if status := process.status:
                    self._console.show_progress(status["step"], status["total_steps"], status["phase"])
            await asyncio.sleep(PERIOD_S)

    async def _stalled(self) -> ExitReason:
        """Return when the run stalls."""
        watch = StallWatch(
            timeout_s=self._config.launcher.stall_timeout,
            setup_timeout_s=setup_timeout_s(self._config),
            logs=self._logs,
            expected=self._expected,
            count_output=lambda: self._num_output_bytes,
        )
        for line in await watch.stall():
            self._say(line)
        return ExitReason(STALLED, "the run is stalled")

    def _describe(self, status: int) -> str:
        """Say how a job ended; of other nodes, only Slurm and Ray know whether memory was the reason."""
        is_oom = status == 128 + signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        return describe_exit(status) + (f", because {_NO_MEMORY}" if is_oom else "")

    async def _run_job(self, slot: Slot, job: Job) -> int:
        """Run a job on a slot to its end; a cancelled one is ended by `_stop`."""
        ours = {SECRET_VARIABLE: self._secret, REGISTRY_VARIABLE: self._registry.address}
        progress = {FOLDER_VARIABLE: str(self._logs.absolute() / "progress"), NAME_VARIABLE: job.name}
        if self._config.perf_trace:
            progress[trace.FOLDER_VARIABLE] = str(self._logs.absolute() / "trace")
        output = self._output(job.name)

        def take(data: bytes) -> None:
            self._num_output_bytes += len(data)
            output.feed(data)

        job = dataclasses.replace(job, env={**ours, **job.env, **progress})
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
            path, is_server = self._logs / f"{name}.log", name.startswith("server")
            self._outputs[name] = Output(
                name, path, self._console, only_warnings=is_server, is_foreground=name == "trainer-0"
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

    async def _end_training(self) -> None:
        """After a signal let the trainer write its last checkpoint and report, while servers go on."""
        ranks = {run: slot for run, slot in self._running.items() if slot in self._slots_of_ranks}
        for slot in ranks.values():
            slot.terminate()
        if ranks:
            await asyncio.wait(ranks, timeout=self._config.launcher.stop_timeout)

    def _say_what_is_kept(self) -> None:
        folder, mode = self._run.folder, self._config.recover.mode
        report = f"; report: {folder.report}" if folder.report.exists() else ""
        steps = [row["step"] for row in read_jsonl(folder.metrics)]
        if folder.is_finished:
            self._say(f"the run has finished{report}")
            return
        if not trains(self._config):
            self._say(f"the same command continues with what is not answered yet{report}")
            return
        self._say((f"stopped after step {steps[-1]}" if steps else "stopped before the first step was done") + report)
        if folder.newest_checkpoint < 0:
            self._say(f"nothing is kept to continue from (recover.mode={mode}): the same command starts again")
        else:
            what = "the same command" if mode in ("auto", "resume") else "recover.mode=auto"
            self._say(f"{what} continues from step {folder.newest_checkpoint + 1}")

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
        shutil.rmtree(self._logs / "progress", ignore_errors=True)
        for output in self._outputs.values():
            output.close()

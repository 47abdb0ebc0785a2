"""Runs the jobs of a run until a failure, a signal or the trainer's end, then ends all of them within seconds.

A `Place` decides where a job runs. A server that ends before it was ready ends the run; one that ends later is
restarted while the others serve. A job's exit status alone says why it ended (`api.errors`).
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.api.errors import NODE_LOST, PEER_LOST, REFUSED, SERVER_FAILED, STALLED, ConfigError
from arealite.inference.registry import Registry
from arealite.launcher.place.base import Job, NodeLostError, Place, Slot
from arealite.launcher.plan.jobs import server_job, trainer_job
from arealite.launcher.plan.plan import Placement, Run, setup_timeout_s, trains
from arealite.launcher.supervise.console import Console, Output
from arealite.utils import trace
from arealite.utils.files import read_jsonl
from arealite.utils.heartbeat import FOLDER_VARIABLE, NAME_VARIABLE
from arealite.utils.processes import (
    REGISTRY_VARIABLE,
    SERVER_ADDRS_VARIABLE,
    adopt_orphans,
    descendants,
    describe_exit,
    kill_tree,
    num_oom_kills,
)
from arealite.utils.secret import SECRET_VARIABLE
from arealite.watchdog.stall import StallWatch

_GRACE_S = 5.0  # between SIGTERM and SIGKILL
_CLEAN_UP_S = 15.0
_STATUS_INTERVAL_S = 10.0  # between two lines about a server that is not ready yet
_CAUSE_S = 5.0  # wait for the rank that caused the failure of its peer: it may still be writing its traceback
_SERVER_END_S = 0.5  # wait for the end of a server, which explains a failure of the trainer


def pause_s(num_restarts: int) -> float:
    """Return the delay before a restart, which grows with the number of restarts in a row."""
    return min(60.0, 2.0 ** (num_restarts - 1)) if num_restarts else 0.0


class Jobs:
    """The jobs of one attempt: each writes a log and to the console, and none is left behind."""

    def __init__(self, logs: Path, env: Mapping[str, str]) -> None:
        """`env` is added to the environment of every job."""
        self.console = Console()
        self.num_output_bytes = 0
        self._logs = logs
        self._env = env
        self._outputs = {"launcher": Output("launcher", logs / "launcher.log", self.console)}
        self._running: dict[asyncio.Task[int], Slot] = {}
        self._closing: list[asyncio.Task[None]] = []  # slots whose jobs have ended
        self._num_oom_kills = num_oom_kills()
        self._children_before = set(descendants(os.getpid()))
        self._adopted_before = adopt_orphans()

    def log(self, text: str) -> None:
        """Write a line of the launcher to the console and to launcher.log."""
        self._outputs["launcher"].feed(f"{text}\n".encode())

    def output(self, name: str) -> Output:
        """Return the output of a job. The console shows only the warnings of servers, and no prefix for rank 0."""
        if name not in self._outputs:
            self._outputs[name] = Output(
                name,
                self._logs / f"{name}.log",
                self.console,
                only_warnings=name.startswith("server"),
                has_prefix=name != "trainer-0",
            )
        return self._outputs[name]

    async def run(self, slot: Slot, job: Job) -> int:
        """Run a job on a slot to its end; a job whose waiter is cancelled runs until `end`."""
        output = self.output(job.name)
        progress = {FOLDER_VARIABLE: str(self._logs.absolute() / "progress"), NAME_VARIABLE: job.name}

        def feed(data: bytes) -> None:
            self.num_output_bytes += len(data)
            output.feed(data)

        job = dataclasses.replace(job, env={**self._env, **job.env, **progress})
        run = asyncio.create_task(slot.run(job, feed))
        self._running[run] = slot
        run.add_done_callback(self._close_slot)
        return await asyncio.shield(run)

    def _close_slot(self, run: asyncio.Task[int]) -> None:
        self._closing.append(asyncio.create_task(self._running.pop(run).close()))

    def describe(self, status: int) -> str:
        """Describe how a job ended. On other nodes only Slurm and Ray know whether memory was the reason."""
        is_oom = status == 128 + signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        memory = ", because memory ran out (the node's, or what its container or job may use)"
        return describe_exit(status) + memory * is_oom

    async def terminate(self, timeout_s: float, slots: Collection[Slot] | None = None) -> None:
        """SIGTERM the jobs on `slots`, by default all, and wait for their end."""
        runs = {run: slot for run, slot in self._running.items() if slots is None or slot in slots}
        for slot in runs.values():
            slot.terminate()
        if runs:
            await asyncio.wait(runs, timeout=timeout_s)

    def kill(self) -> None:
        """SIGKILL all jobs."""
        for slot in self._running.values():
            slot.kill()

    async def end(self) -> None:
        """End all jobs: by SIGTERM, after a grace period by SIGKILL."""
        await self.terminate(_GRACE_S)
        self.kill()
        if self._running:
            _, of_silent_nodes = await asyncio.wait(self._running, timeout=_GRACE_S)
            for run in of_silent_nodes:
                run.cancel()
            await asyncio.gather(*of_silent_nodes, return_exceptions=True)

    async def clean_up(self) -> None:
        """Wait until the slots are given back, and end what a killed guard has left behind."""
        await asyncio.gather(*self._closing, return_exceptions=True)  # each close has its own deadline
        for pid in set(descendants(os.getpid())) - self._children_before:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        adopt_orphans(self._adopted_before)

    def close(self) -> None:
        """Write what is left of all outputs."""
        for output in self._outputs.values():
            output.close()
        self.console.close()


@dataclass(frozen=True)
class ExitReason:
    """Why the run ended: the launcher's exit status, and the output that explains it."""

    status: int
    reason: str
    output: Output | None = None

    @property
    def is_failure(self) -> bool:
        return self.output is not None or self.status in (REFUSED, SERVER_FAILED, STALLED, NODE_LOST)


class Supervisor:
    """One attempt of a run. Servers register in the run's registry."""

    def __init__(self, run: Run, place: Place, registry: Registry, secret: str) -> None:
        self._run = run
        self._config = run.config
        self._plan = run.plan
        self._place = place
        self._registry = registry
        logs = run.folder.logs
        shutil.rmtree(logs / "progress", ignore_errors=True)
        env = {SECRET_VARIABLE: secret, REGISTRY_VARIABLE: registry.address}
        if run.config.perf_trace:
            env[trace.FOLDER_VARIABLE] = str(logs.absolute() / "trace")
        self._jobs = Jobs(logs, env)
        self._log = self._jobs.log
        self._slots_of_ranks: Sequence[Slot] = ()
        self._server_names = [one.name for one in run.plan.servers]
        self._are_servers_ready = asyncio.Event()
        publishing = (
            run.plan.placements if run.plan.servers and run.config.server_kind.is_embedded else run.plan.trainers
        )
        self._expected = [one.name for one in publishing]  # processes with a heartbeat
        self._tasks: list[asyncio.Task[ExitReason]] = []
        loop = asyncio.get_running_loop()
        self._signal: asyncio.Future[ExitReason] = loop.create_future()  # the user's first signal
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._take_signal, number)

    async def supervise(self, restart: str | None, delay_s: float) -> ExitReason:
        """Start everything after a delay, stop it when something ends the run, and return the reason.

        `restart` is the reason of a restart. A signal while everything is being stopped counts as well.
        """
        try:
            try:
                self._log(restart or f"{self._config.allocation_mode}; logs in {self._run.folder.logs}")
                await asyncio.wait([self._signal], timeout=delay_s)
                self._place.open(self._config, self._plan, self._log)
                attempt = self._watch(self._attempt(is_restart=restart is not None))
                await asyncio.wait([self._signal, attempt], return_when=asyncio.FIRST_COMPLETED)
                reason = self.signalled or attempt.result()
                if reason.status != 0:
                    self._log(f"{reason.reason}: stopping everything")
                if self._signal.done():  # the trainer writes its last checkpoint
                    await self._jobs.terminate(self._config.launcher.stop_timeout, self._slots_of_ranks)
            finally:
                await self._stop()
            if reason.output is not None:
                self._show_last_lines(reason.output, reason.reason)
            if self._signal.done() and self._plan.trainers:
                self._report_what_is_kept()
        finally:
            self._jobs.close()
            await self._place.close()
        return self.signalled or reason

    @property
    def signalled(self) -> ExitReason | None:
        """The user's first signal, which may have come after `supervise`."""
        return self._signal.result() if self._signal.done() else None

    def _take_signal(self, number: int) -> None:
        """End the run at the first signal, and without grace at the second."""
        if self._signal.done():
            self._jobs.kill()
        else:
            self._signal.set_result(ExitReason(128 + number, f"received {signal.Signals(number).name}"))

    async def _attempt(self, *, is_restart: bool) -> ExitReason:
        """Start all jobs, and wait for the first end. That of a server explains one of the trainer.

        The stall watchdog runs only if there is a trainer, as servers may be idle without one.
        """
        try:
            slots = dict(zip(self._plan.placements, await self._place.take(self._plan.placements), strict=True))
        except (NodeLostError, TimeoutError, ConfigError) as error:
            status = REFUSED if isinstance(error, ConfigError) else NODE_LOST
            return ExitReason(status, f"{type(error).__name__}: {error}")
        ends = []
        for server in self._plan.servers:
            self._registry.remove_named(server.name)  # left by a killed server of the last attempt
            ends.append(self._watch(self._serve(server, slots[server])))
        if self._plan.trainers:
            self._slots_of_ranks = [slots[rank] for rank in self._plan.trainers]
            ends += [self._watch(self._train(slots, is_restart=is_restart)), self._watch(self._stalled())]
        of_servers = (SERVER_FAILED, REFUSED)
        done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if all(end.result().is_failure and end.result().status not in of_servers for end in done):
            done |= (await asyncio.wait(others, timeout=_SERVER_END_S))[0]
        reasons = [end.result() for end in ends if end in done]
        return min(reasons, key=lambda reason: (reason.is_failure, reason.status not in of_servers))

    def _watch(self, end: Coroutine[None, None, ExitReason]) -> asyncio.Task[ExitReason]:
        self._tasks.append(asyncio.create_task(end))
        return self._tasks[-1]

    async def _serve(self, placement: Placement, slot: Slot) -> ExitReason:
        """Run a server and return when its end ends the run.

        A server that was ready is restarted, unless it shares the devices of ranks; one that used up its restarts is
        left out while others serve.
        """
        name, was_ready = placement.name, False
        num_restarts, progress = 0, self._run.folder.newest_checkpoint
        max_restarts = 0 if self._plan.takes_turns else self._config.launcher.server_restarts
        while True:
            job = server_job(self._config, placement, slot.address, slot.gpus)
            running = asyncio.create_task(self._jobs.run(slot, job))
            loading = asyncio.create_task(self._becomes_ready(name))
            status = SERVER_FAILED
            try:
                await asyncio.wait({running, loading}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    loading.result()
                    was_ready = True
                exit_status = await running
                status = REFUSED if exit_status == REFUSED else SERVER_FAILED
                ended = f"{name} ended with {self._jobs.describe(exit_status)}"
            except TimeoutError:
                ended = f"{name} was not ready within {setup_timeout_s(self._config):g} s"
                slot.kill()
                with contextlib.suppress(NodeLostError, TimeoutError):  # the next start needs its slot
                    await asyncio.wait_for(running, self._config.launcher.node_timeout + _CLEAN_UP_S)
            except NodeLostError as error:
                ended, status = str(error), NODE_LOST
            finally:
                running.cancel()
                loading.cancel()
            self._registry.remove_named(name)
            if self._run.folder.newest_checkpoint > progress:
                num_restarts, progress = 0, self._run.folder.newest_checkpoint
            if not was_ready or num_restarts == max_restarts:
                break
            num_restarts += 1
            self._log(f"{ended}; starting it again ({num_restarts} of {max_restarts})")
            await asyncio.sleep(pause_s(num_restarts))
            try:
                (slot,) = await self._place.take([placement])
            except (NodeLostError, TimeoutError, ConfigError) as error:
                return ExitReason(status, f"{name} could not be started again: {error}")
        if was_ready:
            self._server_names.remove(name)
            if self._server_names or self._registry.servers:
                self._log(f"{ended}; it is left out, as others serve")
                if name in self._expected:
                    self._expected.remove(name)
                await asyncio.get_running_loop().create_future()  # never ends the run
        return ExitReason(status, ended, self._jobs.output(name))

    async def _becomes_ready(self, name: str) -> None:
        """Wait until a server registers as ready, and log its progress meanwhile. Raises TimeoutError."""
        started, next_line = time.monotonic(), time.monotonic() + _STATUS_INTERVAL_S
        timeout_s = setup_timeout_s(self._config)
        async with asyncio.timeout(timeout_s):
            view = await self._registry.watch()
            while name not in (ready := {one.name: one.address for one in view.servers.values()}):
                if (now := time.monotonic()) >= next_line:
                    next_line = now + _STATUS_INTERVAL_S
                    doing = next(reversed(self._jobs.output(name).hidden), "it has written nothing")
                    self._log(f"waiting for {name} ({now - started:.0f} s of {timeout_s:g} s): {doing}")
                view = await self._registry.watch(view.moment, next_line - now)
        self._log(f"{name} is ready at {ready[name]} after {time.monotonic() - started:.1f} s")
        if not ready.keys() >= set(self._server_names):
            return
        self._are_servers_ready.set()
        if not self._plan.trainers:
            secret = f"{SECRET_VARIABLE}=$(cat {self._run.folder.secret})"
            addresses = ",".join(ready[server] for server in self._server_names)
            self._log(f"servers only, until Ctrl-C: export {secret} {SERVER_ADDRS_VARIABLE}={addresses}")

    async def _train(self, slots: Mapping[Placement, Slot], *, is_restart: bool) -> ExitReason:
        """Run all ranks and return the first failure that no other rank caused."""
        if self._plan.takes_turns:  # servers measure the free memory, which ranks would take
            await self._are_servers_ready.wait()
        first_slot = slots[self._plan.trainers[0]]
        master = first_slot.address, first_slot.port

        async def run(rank: Placement) -> ExitReason | None:
            # NCCL links only GPUs that both sides see, so a rank sees those of its whole node; LOCAL_RANK picks one.
            gpus = [gpu for beside in self._plan.ranks_on(rank.node) for gpu in slots[beside].gpus]
            job = trainer_job(self._run, rank, gpus, master=master, is_restart=is_restart)
            try:
                status = await self._jobs.run(slots[rank], job)
            except NodeLostError as error:
                return ExitReason(NODE_LOST, str(error))
            reason = f"{job.name} failed with {self._jobs.describe(status)}"
            return ExitReason(status, reason, self._jobs.output(job.name)) if status != 0 else None

        ranks = [asyncio.create_task(run(rank)) for rank in self._plan.trainers]
        try:
            first, running = None, set(ranks)
            while running:
                timeout_s = None if first is None else _CAUSE_S
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for failure in filter(None, (rank.result() for rank in done)):
                    if failure.status != PEER_LOST:
                        return failure
                    first = first or failure
                if not done:
                    break
            return first or ExitReason(0, "the trainer is done")
        finally:
            for task in ranks:
                task.cancel()

    async def _stalled(self) -> ExitReason:
        """Return when the run stalls."""
        watch = StallWatch(
            timeout_s=self._config.launcher.stall_timeout,
            setup_timeout_s=setup_timeout_s(self._config),
            logs=self._run.folder.logs,
            expected=self._expected,
            count_output=lambda: self._jobs.num_output_bytes,
        )
        for line in await watch.stall():
            self._log(line)
        return ExitReason(STALLED, "the run is stalled")

    async def _stop(self) -> None:
        """End all jobs and all watches."""
        for task in self._tasks:
            task.cancel()
        await self._jobs.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLEAN_UP_S)
        await self._jobs.clean_up()
        shutil.rmtree(self._run.folder.logs / "progress", ignore_errors=True)

    def _show_last_lines(self, output: Output, reason: str) -> None:
        """Show the last lines of the job that ended the run, unless the console has shown them."""
        if not output.has_lines:
            self._log(f"{reason}; it wrote nothing")
        elif output.hidden:
            self._log(f"{reason}; its last {len(output.hidden)} lines that are not above:")
        for line in output.hidden:
            self._jobs.console.line(f"    {line}")
        self._log(f"the whole log of {output.name}: {output.path}")

    def _report_what_is_kept(self) -> None:
        """Log how far the run came, and what the same command would continue from."""
        folder, mode = self._run.folder, self._config.recover.mode
        report = f"; report: {folder.report}" if folder.report.exists() else ""
        steps = [row["step"] for row in read_jsonl(folder.metrics)]
        if folder.is_finished:
            self._log(f"the run has finished{report}")
            return
        if not trains(self._config):
            self._log(f"the same command continues with what is not answered yet{report}")
            return
        self._log((f"stopped after step {steps[-1]}" if steps else "stopped before the first step was done") + report)
        if folder.newest_checkpoint < 0:
            self._log(f"nothing is kept to continue from (recover.mode={mode}): the same command starts again")
        else:
            command = "the same command" if mode in ("auto", "resume") else "recover.mode=auto"
            self._log(f"{command} continues from step {folder.newest_checkpoint + 1}")

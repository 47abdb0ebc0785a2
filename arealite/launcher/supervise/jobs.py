"""The jobs of one attempt: each writes a log and to the console, and none is left behind."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from arealite.launcher.place.base import Job, Slot
from arealite.launcher.supervise.console import Console, Output
from arealite.utils.heartbeat import FOLDER_VARIABLE, NAME_VARIABLE
from arealite.utils.processes import adopt_orphans, descendants, describe_exit, kill_tree, num_oom_kills

_GRACE_S = 5.0  # between SIGTERM and SIGKILL


class Jobs:
    """Runs jobs on slots and ends them."""

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
        run.add_done_callback(self._running.pop)
        try:
            return await asyncio.shield(run)
        finally:
            if run.done():
                self._closing.append(asyncio.create_task(slot.close()))

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

    async def end(self) -> Collection[Slot]:
        """End all jobs: by SIGTERM, after a grace period by SIGKILL. Return the slots they had."""
        slots = set(self._running.values())
        await self.terminate(_GRACE_S)
        self.kill()
        if self._running:
            await asyncio.wait(self._running, timeout=_GRACE_S)
        return slots

    async def clean_up(self, slots: Collection[Slot]) -> None:
        """Give these slots and those of ended jobs back, and end what a killed guard has left behind."""
        # Each close has its own deadline.
        await asyncio.gather(*self._closing, *(slot.close() for slot in slots), return_exceptions=True)
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

"""Runs jobs on this node, each under a guard."""

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.inference.backends.program import ServerProgram
from arealite.launcher.place.base import Job, Place, Slot
from arealite.launcher.plan.plan import Placement, Plan
from arealite.utils.devices import visible_gpus
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.processes import exit_status

READ_BYTES = 1 << 16


class JobRun:
    """A job on this node."""

    def __init__(self) -> None:
        self._guard: asyncio.subprocess.Process | None = None
        self._killed = asyncio.Event()

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        """Run a job to its end and return its exit status; one that was killed before never begins."""
        if self._killed.is_set():
            return exit_status(-signal.SIGKILL)
        with _pipe_to(output) as writer:
            self._guard = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "arealite.launcher.place.guard", *job.command],
                cwd=job.folder,
                env=os.environ | _terminal() | job.env,
                stdin=asyncio.subprocess.PIPE,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
            )
            if self._killed.is_set():
                self.kill()
            return exit_status(await self._guard.wait())

    def terminate(self) -> None:
        """Send the job SIGTERM; one that has not begun never does."""
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


def _terminal() -> dict[str, str]:
    """Return the variable that tells a job how wide the terminal is that shows its lines."""
    return {"COLUMNS": str(os.get_terminal_size(sys.stdout.fileno()).columns)} if sys.stdout.isatty() else {}


class LocalSlot(JobRun):
    """A slot on this node."""

    address = LOOPBACK

    def __init__(self, gpus: Sequence[str]) -> None:
        super().__init__()
        self.gpus = gpus
        self._holder = hold_port()
        self.port = port_of(self._holder)

    async def close(self) -> None:
        self._holder.close()


class LocalPlace(Place):
    """This node as a place for all jobs."""

    is_here = True

    def check(self, config: BaseExperimentConfig, plan: Plan) -> None:
        if config.cluster.n_nodes != 1:
            raise ConfigError(
                f"cluster.n_nodes must be 1 for the local launcher: got {config.cluster.n_nodes}. Set "
                "cluster.n_nodes=1, or use arealite.launcher.ray, slurm or torchrun."
            )
        if plan.servers:
            ServerProgram(config).check_installed()
        if plan.groups and importlib.util.find_spec("ray") is None:
            raise ConfigError("Ray must be installed for workers: it is not. Run `pip install 'arealite[ray]'`.")
        if plan.num_gpus > len(self._gpus):
            raise ConfigError(
                f"allocation_mode must fit the GPUs: got {config.allocation}, which needs {plan.num_gpus}, and "
                f"{len(self._gpus)} GPUs on this node. Make it smaller, or set cluster.n_gpus_per_node=0 to run on the "
                "CPU."
            )

    def open(self, config: BaseExperimentConfig, plan: Plan, log: Callable[[str], None]) -> None:
        num_used = sum(len(one.devices) for one in plan.placements)
        self._gpus_of_workers = self._gpus[num_used:][: sum(group.num_gpus for group in plan.groups)]

    async def take(self, placements: Sequence[Placement]) -> Sequence[Slot]:
        """Take slots; that of a master has the GPUs of its workers, for which it starts Ray."""
        return [
            LocalSlot(
                self._gpus_of_workers
                if one.role == "trainer" and not one.devices
                else [self._gpus[device] for device in one.devices]
            )
            for one in placements
        ]

    @functools.cached_property
    def _gpus(self) -> list[str]:
        return visible_gpus()


@contextlib.contextmanager
def _pipe_to(output: Callable[[bytes], None]) -> Iterator[int]:
    """Return the writing end of a pipe whose other end feeds `output`; also a process that outlives us may hold it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def read() -> bool:
        try:
            data = os.read(reader, READ_BYTES)
        except BlockingIOError:
            return False
        output(data)
        return True

    loop = asyncio.get_running_loop()
    loop.add_reader(reader, read)
    try:
        yield writer
    finally:
        loop.remove_reader(reader)
        while read():  # what ended processes have written
            pass
        os.close(reader)
        os.close(writer)

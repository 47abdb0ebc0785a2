"""Runs an experiment inside a Slurm allocation: the program of the batch script that `slurm` submits.

It is the common launcher on the first node. A slot is a job step: srun starts a relay there and connects its stdin
and stdout to us. Steps overlap, so each sees all that the job has on its node, and the plan alone says which GPUs it
uses. A step whose srun ends loses its stdin and ends its job; the end of this program ends the whole allocation.

When a node is lost, a run that may be restarted continues in the allocation if all nodes still answer.
Otherwise the job goes back into the queue (`scontrol requeue`), as Slurm itself does when it notices first. Invariant:
only the newest start of a job may requeue it, since an older one can live on where Slurm has lost sight of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

from arealite.api.cli_args import BaseExperimentConfig, LauncherConfig
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.inference.backends import kind_of
from arealite.launcher.place.base import Slot
from arealite.launcher.place.relay import RelaySlot, take_all
from arealite.launcher.plan.plan import Placement, Plan
from arealite.launcher.supervise import run
from arealite.launcher.supervise.supervisor import CONFIG_FAILED, NODE_LOST, Supervisor
from arealite.utils.file_lock import file_lock
from arealite.utils.network import LOOPBACK, host_ip
from arealite.utils.secret import is_loopback

_READ_BYTES = 1 << 16
_PROGRESS_S = 10.0
_CLOSE_S = 10.0
"""What the end of a job's processes and of its relay may take, once it was told."""
_CONTROL_S = 60.0
"""What an answer of Slurm may take, and the end of a job that it was told to requeue."""
_REQUEUE_S = 300.0
"""So long the job is tried to be requeued while Slurm's controller does not answer."""
_OLD_LIFE_S = 120.0
"""What the launcher of the last start may take to end, on a node that Slurm has lost sight of."""


class SlurmSlot(RelaySlot):
    """A slot that an srun keeps."""

    def __init__(self, node: str, srun: asyncio.subprocess.Process, *, timeout_s: float) -> None:
        super().__init__(node, self._chunks(), self._send_to_srun, self._close_srun_input, timeout_s=timeout_s)
        self._srun = srun

    async def close(self) -> None:
        """Wait until the step has ended."""
        await super().close()
        try:
            await asyncio.wait_for(self._srun.wait(), _CLOSE_S)
        except TimeoutError:  # its node is gone; Slurm ends what may be left there with the job
            with contextlib.suppress(ProcessLookupError):
                self._srun.kill()
            await self._srun.wait()

    async def _chunks(self) -> AsyncIterator[bytes]:
        assert self._srun.stdout is not None
        while chunk := await self._srun.stdout.read(_READ_BYTES):
            yield chunk

    def _send_to_srun(self, data: bytes) -> None:
        assert self._srun.stdin is not None
        self._srun.stdin.write(data)

    def _close_srun_input(self) -> None:
        assert self._srun.stdin is not None
        self._srun.stdin.close()


class SlurmPlace:
    """The nodes of the allocation that we are in."""

    def __init__(
        self, config: LauncherConfig, nodes: Sequence[str], *, setup_timeout_s: float, log: Callable[[str], None]
    ) -> None:
        """`log` tells the user of waits."""
        self._config = config
        self._nodes = nodes
        self._setup_timeout_s = setup_timeout_s
        self._log = log

    async def take(self, placements: Sequence[Placement]) -> list[Slot]:
        """Start a step for each placement; NodeLostError names a node where none starts."""
        slots = await take_all(
            placements,
            self._take,
            timeout_s=self._setup_timeout_s,
            log=self._log,
            describe=lambda missing: f"our program on {', '.join(sorted({self._nodes[one.node] for one in missing}))}",
            advice="Look after these nodes.",
        )
        unreachable = [slot.node for slot in slots if is_loopback(slot.address)]
        if unreachable and len({slot.host for slot in slots}) > 1:
            await asyncio.gather(*(slot.close() for slot in slots))
            raise ConfigError(
                f"every node must have an address that others reach: got a loopback for {', '.join(unreachable)}. "
                "Let the names of Slurm's nodes resolve on all of them."
            )
        return list(slots)

    async def close(self) -> None:
        """The allocation ends with us."""

    async def _take(self, placement: Placement) -> SlurmSlot:
        node = self._nodes[placement.node]
        neighbour = self._nodes[(placement.node + 1) % len(self._nodes)] if len(self._nodes) > 1 else LOOPBACK
        srun = await asyncio.create_subprocess_exec(
            *step_command(self._config, placement, node=node, toward=neighbour),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        slot = SlurmSlot(node, srun, timeout_s=self._config.node_timeout)
        try:
            await slot.meet()
        except BaseException:
            await slot.close()
            raise
        return slot


def step_command(config: LauncherConfig, placement: Placement, *, node: str, toward: str) -> list[str]:
    """Return the srun of a relay, in a container if its role has an image.

    `toward` is the node whose side of the network the job's address must be on.
    """
    slurm = config.slurm
    srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--cpu-bind=none", "--quiet"]
    image = slurm.inference_server_image if placement.role == "server" else slurm.trainer_image
    container = []
    if slurm.container_type == "apptainer" and image:
        container = ["apptainer", "exec", *(["--nv"] if placement.devices else [])]
        container += [*(["--bind", slurm.mount] if slurm.mount else []), image]
    relay = [sys.executable, "-m", "arealite.launcher.place.relay", "--toward", toward]
    relay += ["--watchdog", f"{config.node_timeout:g}", "--devices", ",".join(map(str, placement.devices))]
    return [*srun, *shlex.split(slurm.srun_additional_args), *container, *relay]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = run.parse(
        argv,
        prog="python3 -m arealite.launcher.place.slurm",
        description="Start inference servers and trainer on the nodes of the Slurm allocation that this runs in.",
    )
    try:
        config = load_run_config(args.argv, run.entry_script(args.entry))
        nodes = _control("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        with file_lock(RunFolder(config).launcher_lock, timeout_s=_OLD_LIFE_S):
            pass
    except (ConfigError, TimeoutError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return CONFIG_FAILED
    number = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def open_place(config: BaseExperimentConfig, plan: Plan, supervisor: Supervisor) -> SlurmPlace:
        return SlurmPlace(
            config.launcher,
            nodes[: plan.num_nodes],
            setup_timeout_s=run.setup_timeout_s(config),
            log=supervisor.log,
        )

    backend = run.Backend(
        "Slurm",
        open_place,
        lambda config, plan: _check(config, plan, nodes),
        registry_host=lambda plan: host_ip(nodes[1]) if plan.num_nodes > 1 else LOOPBACK,
        nodes_answer=lambda: _nodes_answer(nodes, config.launcher.node_timeout),
    )
    status = run.launch(
        args.entry, args.argv, backend, restart=f"Slurm has started the job again ({number})" if number else None
    )
    if status == NODE_LOST and config.recover.mode in ("auto", "fault"):
        _requeue(number, config.recover.retries)
    return status


def _check(config: BaseExperimentConfig, plan: Plan, nodes: Sequence[str]) -> None:
    """Refuse what the allocation does not have."""
    if len(nodes) < plan.num_nodes:
        raise ConfigError(
            f"the allocation must have cluster.n_nodes={plan.num_nodes} nodes: got {len(nodes)} "
            f"({' '.join(nodes)}). Leave --nodes out of launcher.slurm.sbatch_additional_args."
        )
    if plan.servers and not config.launcher.slurm.inference_server_image:
        kind_of(config).check_installed(config)


def _nodes_answer(nodes: Sequence[str], timeout_s: float) -> bool:
    """Tell whether a step starts on every node."""
    number = str(len(nodes))
    step = ["srun", "--overlap", "--nodes", number, "--ntasks", number, "--cpu-bind=none", "--quiet", "true"]
    try:
        return subprocess.run(step, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _requeue(number: int, retries: int) -> None:
    """Give a broken allocation back and let the job wait for another, unless it has or may not; `number` counts its
    starts."""
    deadline = time.monotonic() + _REQUEUE_S
    while True:
        try:
            _requeue_now(os.environ["SLURM_JOB_ID"], number, retries)
            return
        except (ConfigError, TimeoutError) as error:  # the controller may suffer from the same failure
            print(error, file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                return
        time.sleep(_PROGRESS_S)


def _requeue_now(job: str, number: int, retries: int) -> None:
    state = _control("show", "job", job, "--oneliner").split()
    if f"Restarts={number}" not in state or "JobState=RUNNING" not in state:
        return
    if number >= retries:
        print(f"job {job} is not started again: recover.retries={retries} starts are used up", file=sys.stderr)
        return
    print(f"job {job} goes back into the queue, as a node is lost", file=sys.stderr, flush=True)
    _control("requeue", job)
    time.sleep(_CONTROL_S)  # until Slurm ends us


def _control(*words: str) -> str:
    """Ask Slurm. Raises TimeoutError or ConfigError with its answer."""
    command = ["scontrol", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONTROL_S, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"Slurm must answer `{shlex.join(command)}` within {_CONTROL_S:g} s: it did not") from None
    if done.returncode != 0:
        raise ConfigError(f"Slurm must accept `{shlex.join(command)}`: got {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

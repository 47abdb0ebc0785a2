"""Runs an experiment inside a Slurm allocation: the program of the batch script that `slurm` submits.

A slot is a job step: srun starts a relay and connects its stdin and stdout to us. Steps overlap, so each sees all that
the job has on its node, and the plan alone says which GPUs it uses. When a node is lost and not all answer, a run that
may be restarted goes back into the queue. Invariant: only the newest start of a job may requeue it, since an older one
may still run on a node that Slurm has lost.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from arealite.api.cli_args import BaseExperimentConfig, LauncherConfig
from arealite.api.errors import NODE_LOST, ConfigError
from arealite.inference.backends.program import ServerProgram
from arealite.launcher.place.local import READ_BYTES
from arealite.launcher.place.relay import RelayPlace, RelaySlot
from arealite.launcher.plan.plan import Placement, Plan, Run
from arealite.launcher.supervise.run import command, launch
from arealite.utils.network import LOOPBACK, address_toward

_RETRY_S = 10.0
_CLOSE_S = 10.0  # for a job's processes and its relay to end after they were asked to
_ANSWER_S = 60.0  # for an answer of Slurm
_REQUEUE_S = 300.0  # for attempts to requeue while Slurm's controller does not answer
_END_S = 60.0  # for a requeued job to end
_OLD_LIFE_S = 120.0  # for the launcher of the previous start to end, on a node that Slurm has lost


class SlurmSlot(RelaySlot):
    """A slot that an srun keeps."""

    def __init__(self, node: str, srun: asyncio.subprocess.Process, *, timeout_s: float) -> None:
        assert srun.stdin is not None and srun.stdout is not None
        read = functools.partial(srun.stdout.read, READ_BYTES)
        super().__init__(node, read, srun.stdin.write, srun.stdin.close, timeout_s=timeout_s)
        self._srun = srun

    async def close(self) -> None:
        await super().close()
        try:
            await asyncio.wait_for(self._srun.wait(), _CLOSE_S)
        except TimeoutError:  # its node is gone; Slurm ends what may be left there with the job
            with contextlib.suppress(ProcessLookupError):
                self._srun.kill()
            await self._srun.wait()


class SlurmPlace(RelayPlace):
    """The nodes of the allocation that we are in."""

    _ADVICE = "Check these nodes."

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes

    def check(self, config: BaseExperimentConfig, plan: Plan) -> None:
        if len(self._nodes) < plan.num_nodes:
            raise ConfigError(
                f"the allocation must have cluster.n_nodes={plan.num_nodes} nodes: got {len(self._nodes)} "
                f"({' '.join(self._nodes)}). Leave --nodes out of launcher.slurm.sbatch_additional_args."
            )
        if plan.servers and not config.launcher.slurm.inference_server_image:
            ServerProgram(config).check_installed()

    def registry_host(self, plan: Plan) -> str:
        return address_toward(self._nodes[1]) if plan.num_nodes > 1 else LOOPBACK

    def nodes_answer(self) -> bool:
        """Tell whether a step starts on every node."""
        number = str(len(self._nodes))
        step = ["srun", "--overlap", "--nodes", number, "--ntasks", number, "--cpu-bind=none", "--quiet", "true"]
        try:
            done = subprocess.run(step, stdin=subprocess.DEVNULL, timeout=self._config.node_timeout, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    async def _take(self, placement: Placement) -> SlurmSlot:
        """Start a step; NodeLostError names a node where none starts."""
        node = self._nodes[placement.node]
        num_nodes = self._plan.num_nodes
        neighbour = self._nodes[(placement.node + 1) % num_nodes] if num_nodes > 1 else LOOPBACK
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

    def _describe(self, missing: Sequence[Placement]) -> str:
        return f"the relay on {', '.join(sorted({self._nodes[one.node] for one in missing}))}"


def step_command(config: LauncherConfig, placement: Placement, *, node: str, toward: str) -> list[str]:
    """Return the srun of a relay, in a container if its role has an image; `toward` is a node that must reach it."""
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
    description = "Start inference servers and trainer on the nodes of the Slurm allocation that this runs in."
    return command(argv, _launch, prog="arealite.launcher.place.slurm", description=description, by="Slurm")


def ask_slurm(*command: str) -> str:
    """Return what a command of Slurm answers. Raises ConfigError with its refusal, or because it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Slurm must answer `{shlex.join(command)}` within {_ANSWER_S:g} s: it did not") from None
    if done.returncode != 0:
        raise ConfigError(f"Slurm must accept `{shlex.join(command)}`: got {done.stderr.strip()}")
    return done.stdout


def _launch(run: Run, _: argparse.Namespace) -> int:
    """Run in the allocation, and give a broken one back."""
    place = SlurmPlace(ask_slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split())
    number = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    restart = f"Slurm has started the job again ({number})" if number else None
    status = launch(run, place, restart=restart, is_checked=True, lock_timeout_s=_OLD_LIFE_S)
    if status == NODE_LOST and run.config.recover.mode in ("auto", "fault"):
        _requeue(os.environ["SLURM_JOB_ID"], number, run.config.recover.retries)
    return status


def _requeue(job: str, number: int, retries: int) -> None:
    """Give a broken allocation back and let the job, started again `number` times, wait for another if it may."""
    deadline = time.monotonic() + _REQUEUE_S
    while time.monotonic() < deadline:
        try:
            state = ask_slurm("scontrol", "show", "job", job, "--oneliner").split()
            if f"Restarts={number}" not in state or "JobState=RUNNING" not in state:
                return
            if number >= retries:
                print(f"job {job} is not started again: recover.retries={retries} starts are used up", file=sys.stderr)
                return
            print(f"job {job} goes back into the queue, as a node is lost", file=sys.stderr, flush=True)
            ask_slurm("scontrol", "requeue", job)
            time.sleep(_END_S)
            return
        except ConfigError as error:  # the controller may suffer from the same failure
            print(error, file=sys.stderr, flush=True)
            time.sleep(_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())

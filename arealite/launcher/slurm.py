"""Submits an experiment to Slurm, follows it and returns how it ended.

    python3 -m arealite.launcher.slurm ENTRY.py --config FILE.yaml [--dry-run] [--no-wait] [key=value ...]

The batch script, `job.sbatch` in the run folder, runs `place.slurm` on the first node of the plan. Nothing of the run
lives here: Ctrl-C and SIGTERM stop the run in order (twice: cancel the job), but the end of the terminal or a SIGKILL
leaves it alone. No accounting is needed; all nodes must see the folder of runs.
"""

import argparse
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from arealite.api.errors import NODE_LOST, ConfigError
from arealite.launcher.place.slurm import ask_slurm
from arealite.launcher.plan.jobs import plan_lines
from arealite.launcher.plan.plan import Run, cpus_and_mebibytes, refuse_workers
from arealite.launcher.supervise.run import command, preflight
from arealite.utils.files import write_atomically, writing

_LOOK_S = 0.2  # between two looks at the job's output
_ASK_S = 2.0  # between two questions to Slurm
_SILENCE_S = 600.0  # without an answer of Slurm, whose controller may restart meanwhile
_CANCEL_S = 60.0
_END_S = 30  # for the end of a run besides `stop_timeout`
_OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
"""States of a job that has ended; a job that goes back into the queue is COMPLETING, then PENDING."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return command(
        argv,
        _act,
        prog="arealite.launcher.slurm",
        description="Submit a job to Slurm that starts inference servers and trainer, as allocation_mode says, and "
        "follow it.",
        flags={"--no-wait": "submit only, and print the number of the job"},
    )


def _act(run: Run, args: argparse.Namespace) -> int:
    refuse_workers(run.plan, launcher="arealite.launcher.slurm")
    script, folder = batch_script(run), run.folder.path.absolute()
    if args.dry_run:
        print("\n".join(plan_lines(run, by="Slurm")))
        print(f"\n{run.folder.path / 'job.sbatch'}:\n{script}", end="")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch must be in PATH: it is not. Submit from a node of the Slurm cluster.")
    preflight(run)
    job = _submit(folder, script)
    if args.no_wait:
        print(job)
        return 0
    return follow(job, folder / f"slurm-{job}.log")


def batch_script(run: Run) -> str:
    """Return the script for sbatch. The user's arguments come last, as the last of two equal ones counts."""
    plan, launcher, folder = run.plan, run.config.launcher, run.folder.path.absolute()
    cpus, mebibytes = _needs(run)
    options = [
        f"--job-name={run.config.experiment_name}:{run.config.trial_name}",
        f"--nodes={plan.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *([f"--mem={mebibytes}M"] if mebibytes else []),
        *([f"--gres=gpu:{plan.gpus_per_node}"] if plan.gpus_per_node else []),
        "--requeue" if run.config.recover.mode in ("auto", "fault") else "--no-requeue",
        "--open-mode=append",
        f"--output={folder}/slurm-%j.log",
        f"--chdir={Path.cwd()}",
        f"--signal=B:TERM@{math.ceil(launcher.stop_timeout) + _END_S}",  # a time limit ends in a clean stop
    ]
    users = [line for line in launcher.slurm.sbatch_additional_args.splitlines() if line.strip()]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*map(shlex.quote, options), *users])]
    command = [sys.executable, "-m", "arealite.launcher.place.slurm", str(run.entry), *run.argv]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def follow(job: str, output: Path) -> int:
    """Show a job's states and output until it has ended, and return the exit status of the run; signals stop it."""
    follower = _Follower(job, output)
    with contextlib.ExitStack() as before:
        for number in (signal.SIGINT, signal.SIGTERM):
            before.callback(signal.signal, number, signal.signal(number, follower.take_signal))
        return follower.follow()


def _needs(run: Run) -> tuple[int, int]:
    """Return CPUs and MiB of memory for the node that needs most."""
    cpus, mebibytes = [0] * run.plan.num_nodes, [0] * run.plan.num_nodes
    for one in run.plan.placements:
        more_cpus, more_mebibytes = cpus_and_mebibytes(run.config.launcher, one)
        cpus[one.node] += more_cpus
        mebibytes[one.node] += more_mebibytes
    return max(cpus), max(mebibytes)


def _submit(folder: Path, script: str) -> str:
    """Write the script, hand it to sbatch and return the number of the job."""
    path = folder / "job.sbatch"
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, script, mode=0o600)
    except OSError as error:
        raise ConfigError(str(error)) from error
    try:
        return ask_slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]  # <job>[;<cluster>]
    except ConfigError as error:
        advice = "Change cluster, launcher.*_per_gpu or launcher.slurm.sbatch_additional_args."
        raise ConfigError(f"{error}. {advice}") from error


class _Follower:
    """What the user sees of a submitted job."""

    def __init__(self, job: str, output: Path) -> None:
        self._job = job
        self._output = output
        self._num_read_bytes = 0
        self._last_state = ""
        self._signals: list[int] = []

    def follow(self) -> int:
        """Look until the job has ended."""
        self._say(f"submitted; its output is {self._output}")
        answered_at = time.monotonic()
        while True:
            asked_at = time.monotonic()
            if (state := job_state(self._job)) is not None:
                answered_at = asked_at
                self._tell(state)
            elif asked_at - answered_at > _SILENCE_S:
                self._say(
                    f"Slurm has not answered for {_SILENCE_S:g} s; the job may still run, see squeue --job {self._job}"
                )
                return 1
            self._copy_output()
            if state is not None and (not state or state["JobState"] in _OVER):
                return self._status(state)
            while time.monotonic() - asked_at < _ASK_S:
                time.sleep(_LOOK_S)
                self._copy_output()

    def take_signal(self, number: int, _frame: object) -> None:
        """Ask the launcher in the job to stop; at the second signal cancel the job, at the third leave it running."""
        if len(self._signals) == 2:
            os._exit(128 + number)
        self._signals.append(number)
        command, doing = ["scancel", self._job], "cancelling the job"
        if len(self._signals) == 1 and (job_state(self._job) or {}).get("JobState") == "RUNNING":
            command += ["--batch", "--signal=TERM"]
            doing = "the run stops after a checkpoint; once more cancels the job"
        try:
            subprocess.run(command, timeout=_CANCEL_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            doing = f"the job was not reached ({error}); once more "
            doing += "cancels the job" if len(self._signals) == 1 else "leaves it alone"
        self._say(f"received {signal.Signals(number).name}: {doing}")  # last, as the write may block

    def _tell(self, state: Mapping[str, str]) -> None:
        word = {
            "": "gone: Slurm does not know it any more",
            "PENDING": f"waiting: {state.get('Reason')}",
            "RUNNING": f"running on {state.get('NodeList')}",
        }.get(name := state.get("JobState", ""), name.lower())
        if word != self._last_state:
            self._say(word)
            self._last_state = word

    def _status(self, state: Mapping[str, str]) -> int:
        """Return what the launcher in the job returned; a job that Slurm ended has none."""
        if self._signals:
            return 128 + self._signals[0]
        if state.get("JobState") == "NODE_FAIL":
            return NODE_LOST
        status, number = (int(part) for part in state.get("ExitCode", "1:0").split(":"))
        return status or (128 + number if number else int(state["JobState"] != "COMPLETED"))

    def _copy_output(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._output.open("rb") as file:  # opened anew as NFS wants it
            file.seek(self._num_read_bytes)
            while data := file.read(1 << 16):
                self._num_read_bytes += len(data)
                sys.stdout.buffer.write(data)
        sys.stdout.flush()

    def _say(self, text: str) -> None:
        print(f"job {self._job} | {text}", flush=True)


def job_state(job: str) -> dict[str, str] | None:
    """Return the fields of `scontrol show job`, none if Slurm has forgotten the job; None if it does not answer."""
    try:
        return dict(re.findall(r"(\S+?)=(\S*)", ask_slurm("scontrol", "show", "job", job, "--oneliner")))
    except ConfigError as error:
        return {} if "Invalid job id" in str(error) else None


if __name__ == "__main__":
    sys.exit(main())

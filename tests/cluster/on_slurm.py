"""Trains on a real Slurm cluster of four machines and is hit four times; then runs that are cancelled. Needs root.

    PYTHONPATH=tests python -m cluster.on_slurm

Every process has a machine of its own. The srun of a server is killed, which costs that server alone. The job is sent
back into the queue, and then the trainer's machine loses its slurmd: both times Slurm starts the job again, and it goes
on from its checkpoint. Runs that were cancelled leave nothing. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import AbstractContextManager

from chaos.experiment import Experiment
from harness.processes import marked
from harness.report import make_folder, say, skip

from arealite.utils.processes import describe_exit, wait_gone
from cluster.followed import PACED, ClusterRun, tell_result
from cluster.slurm_cluster import SlurmCluster, why_impossible

NUM_MACHINES = 4
STEPS = 16
ALLOCATION = "lite.d2p1t1+d1p1t1"
OVERRIDES = (
    "cluster.n_nodes=3",
    "cluster.n_gpus_per_node=1",
    "launcher.node_timeout=8",
    "launcher.trainer_threads=1",
    "rollout.setup_timeout=120",
    "launcher.stall_timeout=600",  # the suite holds the trainer while servers start
)
START_S = 240.0
BACK_S = 150.0
END_S = 240.0
GONE_S = 120.0


def main() -> int:
    """Run everything and print the result."""
    if reason := why_impossible():
        return skip(reason)
    folder, model = make_folder("slurm")
    experiments = [
        Experiment(folder / name, model, ALLOCATION, steps=STEPS, batch_size=12, entry=PACED)
        for name in ("hit", "cancelled", "stopped", "held")
    ]
    with SlurmCluster(folder / "slurm", num_nodes=NUM_MACHINES, gpus_per_node=4) as cluster:
        say(f"a Slurm cluster of {NUM_MACHINES} machines with 4 GPUs each")
        with _start(cluster, experiments[0]) as run:
            run.do(2)
            num_processes = len([*marked(run.experiment.folder)])
            say(f"{num_processes} processes")
            _hit(cluster, run)
            verdict = run.finish(END_S)
            faults = run.outcome.faults
        with _start(cluster, experiments[1]) as run:
            run.wait("a server", lambda: run.said(" is ready at ") >= 1, START_S)
            say("scancel")
            cluster.run("scancel", _job(run))
            verdict.broken += _end(run, 128 + signal.SIGTERM)
        with _start(cluster, experiments[2]) as run:
            run.do(1)
            say("Ctrl-C while it trains")
            run.launcher.process.send_signal(signal.SIGINT)
            run.release()
            verdict.broken += _end(run, 128 + signal.SIGINT)
            if not (run.said("launcher | stopped after step ") and run.said("the same command continues from step ")):
                verdict.broken.append("Ctrl-C must leave a checkpoint of the last step: got none")
        with _start(cluster, experiments[3], "launcher.slurm.sbatch_additional_args=--hold") as held:
            held.wait("the job's state", lambda: held.said("waiting: JobHeldUser") > 0, START_S)
            say("Ctrl-C while the job waits")
            held.launcher.process.send_signal(signal.SIGINT)
            verdict.broken += _end(held, 128 + signal.SIGINT)
            faults += ["scancel", "interrupt", "interrupt while it waits"]
        if jobs := cluster.run("squeue", "-h"):
            verdict.broken.append(f"no job may be left: got {jobs}")
    result = {"nodes": NUM_MACHINES, "processes": num_processes, "steps": STEPS, "faults": faults}
    return tell_result(result, verdict, folder)


def _hit(cluster: SlurmCluster, run: ClusterRun) -> None:
    """Do to a run what it survives, one thing after the other."""
    run.fault("killed_srun", "kill -9 of the srun of server-1")
    run.process("srun", "--nodelist=node2").kill()
    run.do(2)
    run.wait("server-1 again", lambda: run.said("launcher | server-1 is ready at") == 2, BACK_S)
    run.fault("requeue", "scontrol requeue", is_fatal=True)
    cluster.run("scontrol", "requeue", _job(run))
    run.wait("a second start", lambda: run.said("started the job again (1)") == 1, BACK_S)
    run.do(1)
    run.fault("killed_slurmd", "kill -9 of the slurmd of the trainer's machine", is_fatal=True)
    cluster.kill_slurmd("node3")
    run.wait("a third start", lambda: run.said("started the job again (2)") == 1, BACK_S)
    say(f"it continues after step {run.last_step}")
    run.release()


def _start(cluster: SlurmCluster, experiment: Experiment, *overrides: str) -> AbstractContextManager[ClusterRun]:
    return ClusterRun.start(
        experiment, "arealite.launcher.slurm", *OVERRIDES, *overrides, SLURM_CONF=cluster.environment["SLURM_CONF"]
    )


def _job(run: ClusterRun) -> str:
    """Return the number of a run's job."""
    found = re.search(r"^job (\d+) \| submitted", run.launcher.text(), re.MULTILINE)
    assert found is not None, run.launcher.output
    return found[1]


def _end(run: ClusterRun, expected: int) -> list[str]:
    """Wait for the end of a cancelled run, and return what is wrong with it."""
    broken = []
    if (status := run.launcher.process.wait(END_S)) != expected:
        broken.append(f"a cancelled run must end with status {expected}: got {describe_exit(status)}")
    say(f"{describe_exit(status)}")
    if left := wait_gone(marked(run.experiment.folder), GONE_S):
        broken.append(f"nothing of a cancelled run may be left: got {left}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
